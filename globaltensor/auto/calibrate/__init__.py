"""Calibration: fit the costs of a cluster to a model that runs on it."""
