"""``python -m cupy_flash selftest``: small cases against the reference, on every device."""

from dataclasses import dataclass

import numpy as np

import cupy_flash as cf
from cupy_flash import reference
from cupy_flash.cli import devices
from cupy_flash.cli.progress import Progress
from cupy_flash.options import ARRAYS, shape_of

# B, Hq, Hk, Nq, Nk, d, d_v. No length is a multiple of a tile; one case needs several tiles.
_SHAPES = {
    "plain": (2, 3, 3, 33, 57, 24, 24),
    "longer than a tile": (1, 1, 1, 150, 311, 64, 64),
    "grouped heads": (1, 6, 2, 19, 40, 32, 16),
    "one query": (6, 20, 5, 1, 129, 64, 64),
    "widest head": (2, 4, 2, 9, 35, 256, 40),
}
_NUMBERS = {"causal": {"causal": True}, "window": {"window": (7, 3), "q_offset": 11},
            "softcap": {"softcap": 2.5}}
_ALL = "all arrays"
_FEATURES = (*_NUMBERS, *ARRAYS, _ALL)


@dataclass(frozen=True)
class Case:
    """One small problem: a dtype, a shape or a feature, and all arrays that belong to it."""

    name: str
    dtype: np.dtype
    arrays: dict
    options: dict


def add_arguments(parser):
    """Add the options of the command."""
    parser.add_argument("-v", "--verbose", action="store_true", help="name every case")
    parser.add_argument("--cpu", action="store_true", help="leave CUDA devices out")


def run(arguments) -> int:
    """Run all cases on all devices; return 0 when all are right, else 1."""
    all_cases = cases()
    print(f"{len(all_cases)} cases, forward and backward, against the reference")
    cpu, faults = _run_device(devices.CpuDevice(), all_cases, arguments.verbose)
    if not arguments.cpu:
        usable, reason = devices.cuda_devices()
        if reason is not None:
            print(f"no GPU is tested: {reason}")
        for device in usable:
            faults += _run_device(device, all_cases, arguments.verbose, others=cpu)[1]
    print("all is well" if not faults else f"{faults} cases FAILED")
    return 1 if faults else 0


def cases():
    """Return the cases: each shape and each feature in each dtype that this machine can judge."""
    dtypes = [np.dtype(np.float32), np.dtype(np.float16)]
    if np.finfo(np.longdouble).eps < np.finfo(np.float64).eps:
        dtypes.append(np.dtype(np.float64))
    else:
        print("long double is no wider than float64 here: float64 is left out")
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        print("ml_dtypes is not installed: bfloat16 is left out")
    else:
        dtypes.append(np.dtype(bfloat16))
    return [_case(name, dtype, seed) for dtype in dtypes
            for seed, name in enumerate((*_SHAPES, *_FEATURES))]


def check(device, case):
    """Run one case.

    Returns
    -------
    results : dict of str to numpy.ndarray
        What the device computed, as float64.
    bounds : dict of str to float
        How far each may lie from the truth: twice what is promised, that is four times the error
        of the baseline in the same dtype plus eight roundings of the largest value. The largest
        error of a small case is partly luck, and this command must not cry wolf.
    faults : list of str
        One line for each result that is wrong; empty when all is well.
    """
    # For float64 the truth is computed in long double: in float64 it would be as wrong as ours.
    wide = np.longdouble if case.dtype == np.float64 else np.float64
    truth = _by_reference(case, reference.attention, reference.attention_backward,
                          compute_dtype=wide)
    plain = _by_reference(case, reference.baseline, reference.baseline_backward)
    results = _by_device(device, case)
    bounds, faults = {}, []
    for name, true in truth.items():
        finite = np.isfinite(true)
        largest = np.max(np.abs(true[finite]), initial=0)
        bounds[name] = (4 * _distance(plain[name], true, finite)
                        + 8 * _epsilon(case.dtype, name) * largest)
        faults += _fault(case, name, results[name], true, bounds[name])
    return results, bounds, faults


def _run_device(device, all_cases, verbose, others=None):
    """All cases on one device; `others` are the results of the CPU to compare with."""
    found, wrong, lines = {}, 0, []
    with Progress(len(all_cases), device.name) as progress:
        for case in all_cases:
            results, bounds, faults = check(device, case)
            if others is not None:
                for name, other in others[case.name].items():
                    faults += _fault(case, f"{name} beside the CPU's", results[name], other,
                                     bounds[name])
            found[case.name] = results
            wrong += bool(faults)
            lines += faults or ([f"  ok    {case.name}"] if verbose else [])
            progress.step()
    print("\n".join([*lines, f"{device.name}: {len(all_cases) - wrong} of {len(all_cases)} right"]))
    return found, wrong


def _case(name, dtype, seed):
    """Build a case; values have mean 1, which shows errors that cancel out around 0."""
    rng = np.random.default_rng(seed)
    B, Hq, Hk, Nq, Nk, d, d_v = _SHAPES.get(name, _SHAPES["plain"])
    shapes = {"q": (B, Hq, Nq, d), "k": (B, Hk, Nk, d), "v": (B, Hk, Nk, d_v),
              "dout": (B, Hq, Nq, d_v)}
    arrays = {key: (1 + rng.standard_normal(shape)).astype(dtype)
              for key, shape in shapes.items()}
    statistics = np.float64 if dtype == np.float64 else np.float32
    arrays["dlse"] = rng.standard_normal((B, Hq, Nq)).astype(statistics)
    options = _NUMBERS.get(name, {})
    for option in ARRAYS.values():
        if name in (option.name, _ALL):
            # Lengths are what causal attention is aligned by.
            options = options | ({"causal": True} if option.counts else {})
            options[option.name] = _array(option, rng, (B, Hq, Nq, Nk), dtype)
    return Case(f"{name}, {dtype}", dtype, arrays, options)


def _array(option, rng, scores, dtype):
    """A random array with all axes of an option, in the dtype of q where it may have that."""
    shape = shape_of(option.axes, scores)
    if option.counts:
        (extent,) = shape_of(option.counts, scores)
        return rng.integers(1, extent, shape, dtype=np.int32)
    if option.dtypes == ("bool",):
        return rng.random(shape) < 0.5
    x = rng.standard_normal(shape)
    return x.astype(dtype if dtype.name in option.dtypes else option.dtypes[0])


def _by_reference(case, forward, backward, **how):
    """All results by two functions of `cupy_flash.reference`."""
    a = case.arrays
    out, lse = forward(a["q"], a["k"], a["v"], **case.options, **how)
    gradients = backward(a["dout"], a["q"], a["k"], a["v"], dlse=a["dlse"], **case.options, **how)
    return _named(out, lse, gradients)


def _by_device(device, case):
    """All results by the public functions, on a device."""
    a = {key: device.asarray(x) for key, x in case.arrays.items()}
    options = {key: device.asarray(x) if isinstance(x, np.ndarray) else x
               for key, x in case.options.items()}
    (out, lse), pullback = cf.attention_vjp(a["q"], a["k"], a["v"], return_lse=True, **options)
    gradients = pullback(a["dout"], a["dlse"])
    return _named(*(device.asnumpy(x) for x in (out, lse)),
                  [None if x is None else device.asnumpy(x) for x in gradients])


def _named(out, lse, gradients):
    """Results by name, in float64 or wider, without those that do not exist."""
    named = dict(zip(("out", "lse", "dq", "dk", "dv", "dbias", "dsink"), (out, lse, *gradients),
                     strict=True))
    return {name: x.astype(np.result_type(x.dtype, np.float64))
            for name, x in named.items() if x is not None}


def _epsilon(dtype, name):
    """The distance of 1 to the next number: of the dtype, and of float32 or more for `lse`."""
    if name == "lse" and dtype.itemsize == 2:
        return float(np.finfo(np.float32).eps)
    if dtype.name == "bfloat16":        # NumPy has no finfo of it
        return 2.0**-7
    return float(np.finfo(dtype).eps)


def _distance(x, true, finite):
    """The largest error where the truth is finite."""
    return np.max(np.abs(x[finite] - true[finite]), initial=0)


def _fault(case, name, x, true, bound):
    """A line that says what is wrong with `x`, in a list, or an empty list."""
    finite = np.isfinite(true)
    if x.shape != true.shape:
        return [f"  WRONG {case.name}: {name} has shape {x.shape}, not {true.shape}"]
    if not np.array_equal(x[~finite], true[~finite], equal_nan=True):
        return [f"  WRONG {case.name}: {name} has its infinities elsewhere"]
    error = _distance(x, true, finite)
    if not error <= bound:
        return [f"  WRONG {case.name}: {name} is off by {error:.1e}, allowed are {bound:.1e}"]
    return []
