"""The session of OneFlow 0.1 to 0.4: ranks that wait for the master's job calls."""
