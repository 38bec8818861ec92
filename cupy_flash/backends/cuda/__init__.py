"""Everything that knows CUDA. `launch` and `compile` need CuPy; the rest works without it."""
