"""The search on one mesh (Alpa's intra-operator parallelism)."""
