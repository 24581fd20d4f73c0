"""Run ``build()`` once on fake tensors and record what it does. `Graph` calls `capture`."""
