"""Record a job function of OneFlow 0.1 to 0.4, and run it again."""
