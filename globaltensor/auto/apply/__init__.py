"""Apply a plan: to graphs, to modules, and to models in eager mode."""
