"""What carries the collectives: process groups of torch, shared memory, MPI."""
