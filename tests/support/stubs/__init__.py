"""The type stubs of the packages whose names fall through to torch, and how they are made."""
