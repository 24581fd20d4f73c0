"""What is planned: the calls of a model, in segments, with their work."""
