"""Basics for every package here: torch's private names, patches of torch, pytrees.

Nothing here knows about layouts or ranks.
"""
