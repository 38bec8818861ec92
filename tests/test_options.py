"""The table of options: an array option that is a line of it needs no edit elsewhere in Python."""

import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cupy_flash as cf
from cupy_flash import options, results
from cupy_flash.backends.cpu.params import BackwardParams, ForwardParams
from cupy_flash.bind import Options, bind_backward, bind_forward
from cupy_flash.problem import Operands

ROOT = Path(__file__).resolve().parents[1]
# A number for each key, of which the package knows nothing but this line.
LINE = '''Option("weights", kernel="key_weights", axes="bk", forms=("k", "bk"), dtypes=("float32",),
           each="one per key", step="pass `np.ones(Nk, np.float32)`", gradient="dweights",
           changes_scores=True, text="weights"),
    Option("q_lens",'''
CODE = """
import sys
from importlib.util import module_from_spec, spec_from_loader

import numpy as np

text = open("cupy_flash/options.py").read()
assert text.count('Option("q_lens",') == 1
table = module_from_spec(spec_from_loader("cupy_flash.options", None))
sys.modules["cupy_flash.options"] = table
exec(compile(text.replace('Option("q_lens",', LINE), "options.py", "exec"), table.__dict__)

import cupy_flash as cf
from cupy_flash.axes import four_axes
from cupy_flash.backends.cpu import params
from cupy_flash.bind import Options, bind_backward, describe
from cupy_flash.device import Device
from cupy_flash.plan import make_plan
from cupy_flash.results import missing, numpy_arrays

q, k = np.zeros((2, 3, 5, 8), np.float32), np.zeros((2, 3, 7, 8), np.float32)
lse, weights = np.zeros((2, 3, 5), np.float32), np.ones(7, np.float32)

def error(weights):
    try:
        cf.explain(q, k, k, weights=weights)
    except (TypeError, ValueError) as found:
        return str(found)

print(error([1.0]))
print(error(np.ones(7)))
print(error(np.ones(3, np.float32)))
print(cf.explain(q, k, k, weights=weights, wrt=("q", "weights")))
problem, arrays = bind_backward(q, q, k, k, q, lse, Options(weights=weights), wrt=("weights", "k"))
assert problem.has_features and problem.wrt == ("dk", "dweights")
plan = make_plan("backward", problem, Device("cpu", 1))
made = numpy_arrays(missing("backward", problem))
assert {name: (x.shape, x.dtype.name) for name, x in made.items()} == {
    "dk": (k.shape, "float32"), "dweights": ((7,), "float32")}
operands = four_axes(problem, arrays.named | made)
assert operands.key_weights.shape == (2, 7) and operands.key_weights.strides == (0, 4)
assert operands.dweights.shape == (1, 7)
struct = params.pack(plan, operands, {})[0]
assert tuple(struct["key_weights"])[:3] == (arrays.addresses["weights"], 0, 4)
assert struct["dweights"]["address"] == made["dweights"].ctypes.data
filled = params.Template(plan, operands, arrays.addresses).fill(
    dict.fromkeys(arrays.addresses, 0) | {"weights": 4711})
assert filled["key_weights"]["address"] == 4711
print("done")
"""


def test_a_line_of_the_table_is_an_option():
    code = f"LINE = {LINE!r}\n{CODE}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    no_array, dtype, shape, *plans, end = done.stdout.splitlines()
    assert no_array.startswith("`weights` is a list, expected a NumPy or CuPy array")
    assert dtype == ("`weights` has dtype float64, expected float32: pass "
                     "`weights.astype(np.float32)`")
    assert shape == ("`weights` has shape (3,), expected (7,) or (2, 7), one per key: pass "
                     "`np.ones(Nk, np.float32)`")
    forward, backward = (line for line in plans if not line.startswith(" "))
    assert forward.endswith(", weights")
    assert backward.endswith(", weights, no gradient of k v") and end == "done"


def test_the_signature_is_the_table(monkeypatch):
    """`attention` spells the options out, and passes them on in the order of the table."""
    defaults = {name: parameter.default for name, parameter
                in inspect.signature(cf.attention).parameters.items()}
    assert {name: defaults.get(name, "absent") for name in Options._fields} == (
        Options._field_defaults)
    assert [*Options._fields[:len(options.ARRAYS)]] == [*options.ARRAYS]

    def bind(q, k, v, given, *_):
        assert given == Options(*Options._fields)
        raise InterruptedError

    monkeypatch.setattr(sys.modules["cupy_flash.attention"], "bind_forward", bind)
    with pytest.raises(InterruptedError):
        cf.attention(None, None, None, **{name: name for name in Options._fields})


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_results_are_said_as_they_are_allocated(direction):
    """The layouts of what a pass can return are those of its arrays, in any memory order."""
    rng = np.random.default_rng(0)
    for order in ((0, 1, 2), (0, 2, 1), (2, 1, 0), (1, 2, 0)):
        q, k, v, dout = (np.transpose(rng.random([(2, 3, n)[axis] for axis in order] + [d]),
                                      (*np.argsort(order), 3))
                         for n, d in ((5, 8), (7, 8), (7, 6), (5, 6)))
        bias, lse = np.zeros((3, 1, 7)), np.zeros((2, 3, 5))
        problem, _ = (bind_forward(q, k, v, Options(bias=bias)) if direction == "forward" else
                      bind_backward(dout, q, k, v, dout, lse, Options(bias=bias)))
        made = results.numpy_arrays(results.missing(direction, problem))
        for name, one in results.possible(direction, problem).items():
            like = {"out": dout, "dq": q, "dk": k, "dv": v, "dbias": bias, "lse": lse}[name]
            assert made[name].shape == like.shape and made[name].strides == like.strides
            layout = one.layout(name, None)
            assert (layout.shape, layout.strides, layout.dtype) == (
                like.shape, like.strides, like.dtype)


def test_operands_and_structs_have_every_option():
    for option in options.ARRAYS.values():
        assert option.kernel in Operands._fields
        assert option.kernel in ForwardParams.names and option.kernel in BackwardParams.names
    assert {*options.GRADIENTS} <= {*Operands._fields} & {*BackwardParams.names}
