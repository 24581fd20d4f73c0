"""`flow.run` and `flow.spawn`: start ranks from a notebook."""
