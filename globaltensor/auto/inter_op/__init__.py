"""Search over meshes, stages and micro-batches (Alpa's inter-operator parallelism)."""
