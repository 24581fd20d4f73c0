"""The strategies of each call, and their costs."""
