"""`flow.run` and `flow.spawn`: ranks that a notebook starts."""
