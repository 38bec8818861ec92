"""Everything that knows CUDA: CuPy is imported in this folder and nowhere else."""
