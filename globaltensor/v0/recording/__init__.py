"""Recording of job functions of OneFlow 0.1 to 0.4, and their replay; the session uses both."""
