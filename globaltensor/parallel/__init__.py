"""Parallelism of full models: recipes, tensor-parallel plans, experts, adapters."""
