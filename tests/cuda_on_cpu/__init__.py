"""The CUDA kernels on a machine without a GPU: compiled by g++, executed on fibers."""
