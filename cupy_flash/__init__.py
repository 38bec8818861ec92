"""Exact, fast attention for NumPy and CuPy arrays: no framework, no compiler to install.

    attention(...)              the public functions            attention.py
      bind    -> Problem, arrays      all validation            bind.py and what it calls
      plan    -> Plan                 launches and workspace    plan/
      run     -> arrays               kernels                   backends/

A `Problem` says what is asked, without arrays; a `Plan` is data: which kernels run with which tiles
on which scratch memory. Both are hashable and printable, so planning is a pure function that needs
no device, and each backend has one `run`. Importing the package loads NumPy and nothing else;
Numba loads with the first computation. Kernels are compiled at the first call that needs them, by
Numba on the CPU and by NVRTC on a GPU, and kept on disk: that call takes seconds, and
``python -m cupy_flash warmup`` takes them beforehand.
"""

from ._version import __version__
from .attention import Gradients, attention, attention_backward, attention_vjp, explain
from .merge import merge

__all__ = [
    "Gradients",
    "__version__",
    "attention",
    "attention_backward",
    "attention_vjp",
    "explain",
    "merge",
]
