"""The transports of collectives: process groups of torch, shared memory, MPI.

`world` creates communicators and channels over them.
"""
