"""The plan as data, and how it is shown."""
