"""What `warmup` compiles is what calls need: on pretended GPUs of each architecture, on the CPU."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from units import SMEM, device

from cupy_flash import device as devices_of
from cupy_flash.backends.cuda import compile as compiled
from cupy_flash.backends.cuda.unit import unit
from cupy_flash.bind import Options, bind_backward, bind_forward
from cupy_flash.checks import MAX_HEAD_DIM
from cupy_flash.cli import calls, devices, main, warmup
from cupy_flash.options import OPTIONS
from cupy_flash.plan import make_plan

COMPILED = [option.text for option in OPTIONS if option.compiled]
ROOT = Path(__file__).parents[1]
GPUS = {f"sm_{arch}": device(arch) for arch in SMEM}
GPUS["sm_90 with wgmma"] = replace(device(90), targets=("90a",))
GPUS["a small sm_86"] = replace(device(86), sms=16)

# Calls as users make them: batch, query heads, key heads, Nq, Nk, and options of the forward call.
USERS = {
    "prefill": (1, 8, 8, 1024, 1024, {"causal": True}),
    "training": (8, 16, 16, 2048, 2048, {"causal": True}),
    "training, long": (1, 16, 16, 8192, 8192, {}),
    "encoder": (32, 12, 12, 512, 512, {}),
    "encoder, short": (64, 12, 12, 77, 77, {}),
    "image": (2, 16, 16, 197, 197, {}),
    "cross": (2, 8, 8, 1000, 77, {}),
    "decode": (1, 32, 8, 1, 5000, {"causal": True}),
    "decode, many": (64, 32, 8, 1, 700, {}),
    "speculative": (1, 32, 8, 5, 30000, {"causal": True}),
    "chunked prefill": (1, 32, 8, 300, 9000, {"causal": True}),
    "groups of three": (1, 24, 8, 1500, 1500, {"causal": True}),
    "groups of seven": (1, 28, 4, 640, 640, {"causal": True}),
    "window": (1, 8, 8, 3000, 3000, {"causal": True, "window": (255, 0)}),
    "one head": (1, 1, 1, 30000, 30000, {}),
    "points": (1, 1, 1, 300, 100000, {}),
    "mask": (2, 8, 8, 600, 600, {"mask": (2, 1, 1, 600)}),
    "mask, whole": (1, 8, 8, 600, 600, {"mask": (600, 600)}),
    "decode with a mask": (4, 8, 8, 1, 3000, {"mask": (4, 1, 1, 3000)}),
    "bias of pairs": (1, 4, 4, 384, 384, {"bias": (4, 384, 384)}),
    "bias, whole": (2, 4, 4, 384, 384, {"bias": (2, 4, 384, 384)}),
    "bias of positions": (2, 8, 2, 384, 384, {"bias": (8, 384, 384)}),
    "bias of keys": (2, 8, 8, 700, 700, {"bias": (2, 1, 1, 700)}),
    "bias of rows": (2, 8, 8, 700, 700, {"bias": (8, 700, 1)}),
    "softcap": (1, 16, 8, 900, 900, {"causal": True, "softcap": 50.0}),
    "ALiBi": (1, 16, 16, 900, 900, {"causal": True, "alibi_slopes": (16,)}),
    "sinks": (2, 64, 8, 1500, 1500, {"causal": True, "window": (127, 0), "sink": (64,)}),
    "decode with sinks": (1, 64, 8, 1, 5000, {"causal": True, "sink": (64,)}),
}


def array(shape, dtype):
    """An array without memory; layouts are all that is looked at."""
    dense = np.dtype(dtype).itemsize * np.cumprod([1, *shape[:0:-1]])[::-1]
    return np.lib.stride_tricks.as_strided(np.zeros(1, dtype), shape, dense.tolist())


def of(launch):
    """What is compiled for a launch."""
    return unit(launch.entry, launch.config, launch.smem_bytes)


def needs(gpu, dtype, d, call, *, swapped=False, **wanted):
    """The units of a user's call and of its gradients; `swapped`: (B, N, H, d) arrays as views."""
    batch, heads_q, heads_k, Nq, Nk, options = call

    def operand(heads, N):
        if swapped:
            return array((batch, N, heads, d), dtype).swapaxes(1, 2)
        return array((batch, heads, N, d), dtype)

    wide = np.float64 if dtype == np.float64 else np.float32
    dtypes = {"mask": bool, "bias": dtype, "alibi_slopes": np.float32}
    options = {name: array(x, dtypes[name]) if name in dtypes else x for name, x in options.items()}
    if "sink" in options:       # whose elements are looked at
        options["sink"] = np.zeros(options["sink"], wide)
    options = Options(**options)
    q, k = operand(heads_q, Nq), operand(heads_k, Nk)
    lse = array((batch, heads_q, Nq), wide)
    problems = {"forward": bind_forward(q, k, k, options, None, wanted.get("out_dtype"))[0],
                "backward": bind_backward(q, q, k, k, q, lse, options, **{
                    name: x for name, x in wanted.items() if name != "out_dtype"})[0]}
    return {of(launch): launch.entry for direction, problem in problems.items()
            for launch in make_plan(direction, calls.on_gpu(problem, 0), gpu).launches}


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("dtype, d", [("float16", 64), ("float16", 128), ("float32", 40),
                                      ("float64", 128), ("float32", 3), ("float64", 8)])
def test_what_users_call_is_warm(gpu, dtype, d):
    dtype = np.dtype(dtype)
    warm = {of(launch) for launch in calls.launches(gpu, dtype, d, d)}
    cold = {(name, entry) for name, call in USERS.items()
            for key, entry in needs(gpu, dtype, d, call, swapped=name < "e").items()
            if key not in warm}
    assert cold == set()
    wide = np.float64 if dtype == np.float64 else np.float32
    for wanted in ({"out_dtype": wide, "grad_dtype": wide}, {"deterministic": True}):
        for name in ("prefill", "training, long", "mask", "bias of pairs", "decode"):
            cold = {entry for key, entry in needs(gpu, dtype, d, USERS[name], **wanted).items()
                    if key not in warm}
            assert cold == set(), (name, wanted)
    assert len(warm) <= 120


def test_the_kernels_for_sm_90a_are_warm():
    """A call of one query, which is not theirs, does not reach them."""
    entries = {launch.entry for launch in calls.launches(
        GPUS["sm_90 with wgmma"], np.dtype(np.float16), 64, 64)}
    assert {"forward_sm90", "backward_sm90", "forward_sm80", "combine"} <= entries


def test_options_restrict_what_is_compiled():
    gpu, dtype = GPUS["sm_90 with wgmma"], np.dtype(np.float32)

    def entries(*options, **how):
        return {of(launch) for launch in calls.launches(gpu, dtype, 64, 64, options, **how)}

    few, usual, every = entries(), entries(*calls.USUAL), entries(*calls.OPTIONS)
    assert few < usual < every
    assert entries(backward=False) < few
    assert not any(option in name for name, _ in few for option in COMPILED)
    assert any("_tf32_" in name for name, _ in every - usual)
    for name, call in USERS.items():
        if set(call[-1]) <= {"causal", "window"}:
            assert set(needs(gpu, dtype, 64, call)) <= entries("causal"), name


@pytest.fixture
def compiler(monkeypatch):
    """A GPU for sm_90a and a compiler that counts; units with "combine" do not compile."""
    made = []

    def function(number, name, text, smem_bytes, target):
        made.append(name)
        if name.startswith("combine") and compiler.broken:
            raise RuntimeError(f"the CUDA kernel {name} does not compile")

    def compiler(*arguments):
        made.clear()
        return main(["warmup", *arguments]), list(made)

    compiler.broken = False
    gpu = SimpleNamespace(number=0, name="0: Imaginary 1")
    monkeypatch.setattr(devices, "cuda_devices", lambda: ([gpu], None))
    monkeypatch.setattr(devices_of, "gpu", lambda number: GPUS["sm_90 with wgmma"])
    monkeypatch.setattr(compiled, "_function", function)
    monkeypatch.setattr(compiled, "_functions", {})
    monkeypatch.setattr(warmup, "_warm_cpu", lambda dtypes, backward: [])
    return compiler


def test_warmup_compiles_each_unit_once(compiler, capsys):
    status, made = compiler("float16", "--head-dim", "64")
    want = {of(launch)[0] for launch in calls.launches(
        GPUS["sm_90 with wgmma"], np.dtype(np.float16), 64, 64)}
    assert status == 0 and set(made) == want and len(made) == len(want)
    out, err = capsys.readouterr()
    assert out.startswith(f"0: Imaginary 1: {len(want)} of {len(want)} kernels ready after ")
    assert err == ""


def test_what_is_chosen_is_compiled(compiler):
    _, made = compiler("float32", "--head-dim", "192:128", "--forward", "--options")
    assert made and all("d192v128" in name or name.startswith("combine") for name in made)
    assert not any(word in name for name in made for word in ("backward", *COMPILED))
    _, made = compiler("--dtype", "float64", "--head-dim", "64", "--options", "mask")
    assert any("_mask" in name for name in made) and all("float64" in name for name in made)


def test_a_kernel_that_does_not_compile_is_reported(compiler, capsys):
    """And the others are compiled all the same."""
    compiler.broken = True
    status, made = compiler("float32", "--head-dim", "64")
    out, err = capsys.readouterr()
    broken = sum(name.startswith("combine_") for name in made)
    assert status == 1 and f"{len(made) - broken} of {len(made)} kernels ready" in out
    assert err.startswith("0: Imaginary 1: the CUDA kernel combine_")
    assert err.count("\n") == broken


@pytest.mark.parametrize("text", ["0", "257", "-1", "wide", "64:", "64:128:1", "6_4"])
def test_a_bad_head_dim_is_refused_at_once(text, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["warmup", f"--head-dim={text}"])
    assert exit_info.value.code == 2
    assert "expected a whole number from 1 to 256" in capsys.readouterr().err


def test_head_dims_are_those_of_attention():
    assert warmup._head_dim(str(MAX_HEAD_DIM)) == (MAX_HEAD_DIM, MAX_HEAD_DIM)
    assert warmup.WIDEST == MAX_HEAD_DIM


def test_warmup_without_ml_dtypes(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert main(["warmup", "bfloat16"]) == 2
    assert "pip install ml_dtypes" in capsys.readouterr().err


def test_the_jobs_of_the_cpu_run_every_kernel_and_calls_need_no_more():
    code = """if True:
        import numpy as np, cupy_flash as cf
        from cupy_flash.cli import warmup
        for job in warmup.cpu_jobs([np.dtype(np.float32)], True):
            warmup.run_on_cpu(*job)
        from cupy_flash.backends.cpu import KERNELS
        print([len(kernel.signatures) for kernel in KERNELS.values()])
        for dtype in (np.float16, np.float32):
            x = np.ones((2, 2, 130, 16), dtype)
            bias = np.zeros((130, 130), dtype)
            for options in ({}, {"causal": True}, {"bias": bias}, {"mask": bias == 0},
                            {"softcap": 2.0}, {"kv_lens": np.int32([5, 9])}):
                out, pullback = cf.attention_vjp(x, x.swapaxes(1, 2).copy().swapaxes(1, 2), x,
                                                 **options)
                pullback(out)
            cf.attention(x[:, :, :1], x, x, out_dtype=np.float32)
        print([len(kernel.signatures) for kernel in KERNELS.values()])
    """
    # Kernels that share work among threads run only where there are some.
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True,
                          env={**os.environ, "NUMBA_NUM_THREADS": "2"})
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.splitlines()
    assert before == after == str([1] * 6)


def test_cpu_jobs_of_types_that_share_kernels_are_one():
    types = [np.dtype(name) for name in ("float16", "float32", "float64")]
    assert warmup.cpu_jobs(types, False) == [("float32", "forward"), ("float64", "forward")]
    assert warmup.cpu_jobs(types[:2], True) == [("float32", "forward"), ("float32", "backward")]


def test_warmup_of_the_cpu(capfd):
    assert main(["warmup", "float32", "--cpu"]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("the CPU: kernels for float32 arithmetic ready after ") and err == ""


def test_kernels_that_are_not_kept_are_a_fault(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(warmup, "_run_side_by_side", lambda jobs: [])
    assert main(["warmup", "--cpu"]) == 1
    assert "not kept: set NUMBA_CACHE_DIR" in capsys.readouterr().err


def fail(*job):
    """A job that ends with a traceback."""
    raise ValueError("a pretended fault")


def test_a_job_that_fails_is_a_fault(monkeypatch, capfd):
    monkeypatch.setattr(warmup, "_run_quietly", fail)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    assert main(["warmup", "float64", "--forward", "--cpu"]) == 1
    err = capfd.readouterr().err
    assert "a pretended fault" in err
    assert err.endswith("the CPU kernels for float64 forward do not compile\n")


def linger(*job):
    """A job that takes longer than anybody waits."""
    time.sleep(600)


def test_an_interrupt_ends_all_jobs(monkeypatch, capsys):
    def interrupted(sentinels):
        assert len(sentinels) == len(multiprocessing.active_children()) == 2
        raise KeyboardInterrupt

    monkeypatch.setattr(warmup, "_run_quietly", linger)
    monkeypatch.setattr(warmup, "wait", interrupted)
    monkeypatch.setattr(devices_of, "cpu", lambda: devices_of.Device("cpu", 2))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    before = signal.getsignal(signal.SIGINT)
    assert main(["warmup", "--cpu"]) == 130
    for child in multiprocessing.active_children():
        child.join(60)
    assert multiprocessing.active_children() == [] and signal.getsignal(signal.SIGINT) == before
    assert capsys.readouterr() == ("", "interrupted\n")
