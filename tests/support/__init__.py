"""The modules that tests share."""
