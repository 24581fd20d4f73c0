"""Whole models made parallel: recipes, tensor-parallel plans, experts, adapters."""
