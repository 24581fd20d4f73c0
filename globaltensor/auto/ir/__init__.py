"""The representation that planning works on: calls of a model, in segments, with their work."""
