"""Pure values: where a tensor lies."""
