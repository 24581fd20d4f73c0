"""Programs of a user, which type checkers read (tests/base/test_types.py)."""
