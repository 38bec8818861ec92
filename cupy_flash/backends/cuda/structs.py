"""The parameter structs of the CUDA kernels as NumPy's structured types.

Their one definition is in the CUDA sources, from where they are read: fields one after the other as
C++ lays them out, each aligned to its own size, tensor maps to 64 bytes. The compiler compares the
sizes.
"""

import re
from functools import cache

import numpy as np

from . import source

_HEADERS = ("params.cuh", "sm90/params.cuh")
# Type of a field: NumPy's, and its alignment.
_KINDS = {"uint64": ("u8", 8), "int64": ("i8", 8), "double": ("f8", 8), "float": ("f4", 4),
          "int32": ("i4", 4), "TensorMap": ("V128", 64)}
# A struct without functions: its name, its base, and the text of its fields.
_STRUCT = re.compile(r"^struct (\w+)(?: : (\w+))? \{\n(.*?)^\};", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"(\w+) (\w+(?:, \w+)*);")


@cache
def structs():
    """The structs by name, as numpy.dtype: ``"Tensor"``, ``"ForwardParams"`` and so on."""
    known, found = dict(_KINDS), {}
    for header in _HEADERS:
        text = (source.folder() / header).read_text(encoding="utf-8")
        for name, base, body in _STRUCT.findall(re.sub("//.*", "", text)):
            found[name], alignment = _lay_out(found.get(base), known[base][1] if base else 1, [
                (field, *known[kind]) for kind, fields in _FIELD.findall(body)
                for field in fields.split(", ")])
            known[name] = found[name], alignment
    return found


def _lay_out(base, alignment, fields):
    """The type with fields (name, type, alignment) behind those of a base; its alignment."""
    names = list(base.names) if base else []
    formats = [base[name] for name in names]
    offsets = [base.fields[name][1] for name in names]
    end = base.itemsize if base else 0
    for name, kind, aligned in fields:
        offset = _up(end, aligned)
        names, formats, offsets = [*names, name], [*formats, np.dtype(kind)], [*offsets, offset]
        end, alignment = offset + formats[-1].itemsize, max(alignment, aligned)
    return np.dtype({"names": names, "formats": formats, "offsets": offsets,
                     "itemsize": _up(end, alignment)}), alignment


def _up(place, alignment):
    """The first aligned place from one on."""
    return -(-place // alignment) * alignment
