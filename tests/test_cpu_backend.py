"""The CPU path as a citizen of a process: threads, forks, caches, other libraries, memory."""

import multiprocessing
import os
import subprocess
import sys
import textwrap
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import cupy_flash as cf
from cupy_flash import device
from cupy_flash.backends.cpu import cache
from cupy_flash.bind import Options, bind_forward
from cupy_flash.plan import make_plan

ROOT = Path(__file__).parents[1]
SHARED_CACHE = cache.cache_folder().parents[1]      # kernels that other tests compiled


def random_qkv(batch=1, heads=2, N=150, d=40, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((batch, heads, N, d)).astype(dtype) for _ in range(3)]


def run_python(code, cache, **environment):
    """Standard error of a fresh interpreter that runs `code` with an own folder of kernels."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(cache), **environment}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=env, text=True,
                          capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def gradients(q, k, v):
    out, pullback = cf.attention_vjp(q, k, v, causal=True)
    return (out, *pullback(np.ones_like(out))[:3])


def test_eight_threads_get_what_one_gets():
    problems = [random_qkv(N=60 + 20 * i, seed=i) for i in range(16)]
    alone = [gradients(*p) for p in problems]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda p: gradients(*p), problems * 3))
    for got, want in zip(together, alone * 3, strict=True):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


def child(problem, queue):
    queue.put(gradients(*problem))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")   # a fork is what is tested
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_child_processes_compute(method):
    problem = random_qkv(N=500)                 # large enough for all threads
    want = gradients(*problem)                  # the parent's pool is alive when it forks
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=child, args=(problem, queue))
    process.start()
    got = queue.get(timeout=120)
    process.join(30)
    assert process.exitcode == 0
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_number_of_threads_does_not_change_the_forward_pass():
    code = """
        import numpy as np, cupy_flash as cf, sys
        x = np.random.default_rng(0).standard_normal((1, 3, 400, 64), dtype=np.float32)
        sys.stderr.write(cf.attention(x, x, x).tobytes().hex()[:4000])
    """
    results = {run_python(code, SHARED_CACHE, NUMBA_NUM_THREADS=n)[-4000:] for n in ("1", "2", "5")}
    assert len(results) == 1


def test_other_libraries_are_not_needed():
    run_python("""
        import sys
        for name in ("torch", "cupy", "scipy", "jax"):
            sys.modules[name] = None
        import numpy as np, cupy_flash as cf
        x = np.ones((70, 8))
        out, pullback = cf.attention_vjp(x, x, x)
        assert np.allclose(out, 1) and np.allclose(pullback(out).dv, 1)
    """, SHARED_CACHE)


def test_the_folder_of_kernels_is_named_after_all_their_sources(tmp_path, monkeypatch):
    before = cache.source_digest()
    for path in cache.SOURCES.glob("*.py"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(cache, "SOURCES", tmp_path)
    cache.source_digest.cache_clear()
    try:
        assert cache.source_digest() == before
        for name in ("softmax.py", "micro_kernel.py"):
            with (tmp_path / name).open("a") as file:
                file.write("#\n")
            cache.source_digest.cache_clear()
            assert cache.source_digest() != before
            before = cache.source_digest()
            assert before in str(cache.cache_folder())
        sizes = tmp_path / "sizes.py"
        sizes.write_bytes(cache.SIZES.read_bytes() + b"#\n")
        monkeypatch.setattr(cache, "SIZES", sizes)
        cache.source_digest.cache_clear()
        assert cache.source_digest() != before
    finally:
        cache.source_digest.cache_clear()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_memory_is_results_and_planned_workspace(dtype):
    N, d = 4096, 16
    q, k, v = random_qkv(heads=2, N=N, d=d, dtype=dtype)
    out, lse = cf.attention(q, k, v, return_lse=True)          # compiled before it is measured
    cf.attention_backward(out, q, k, v, out, lse)
    problem, *_ = bind_forward(q, k, v, Options())
    limits = {
        "forward": out.nbytes + lse.nbytes,
        "backward": q.nbytes + k.nbytes + v.nbytes,
    }
    calls = {
        "forward": lambda: cf.attention(q, k, v),
        "backward": lambda: cf.attention_backward(out, q, k, v, out, lse),
    }
    for direction, call in calls.items():
        plan = make_plan(direction, problem, device.cpu())
        tracemalloc.start()
        call()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        limit = limits[direction] + plan.workspace_bytes
        assert peak < limit + 100_000                           # Python's own objects
        assert plan.workspace_bytes < N * N * out.itemsize / 8


def test_the_resident_set_grows_by_no_score_matrix():
    """What malloc calls inside the kernels would add is invisible to tracemalloc."""
    code = """
        import resource, numpy as np, cupy_flash as cf
        x = np.random.default_rng(0).standard_normal((200, 16), dtype=np.float32)
        out, lse = cf.attention(x, x, x, return_lse=True)
        cf.attention_backward(out, x, x, x, out, lse)
        x = np.random.default_rng(0).standard_normal((16384, 16), dtype=np.float32)
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        before = peak()
        out, lse = cf.attention(x, x, x, return_lse=True, causal=True)
        cf.attention_backward(out, x, x, x, out, lse, causal=True)
        assert peak() - before < 40, (before, peak())           # one score matrix has 1024 MiB
    """
    run_python(code, SHARED_CACHE)


def test_the_environment_asks_for_plans():
    code = """
        import numpy as np, cupy_flash as cf
        q = np.ones((5, 8))
        cf.attention(q, q, q)
        cf.attention(q, q, q)
    """
    said = run_python(code, SHARED_CACHE, CUPY_FLASH_PRINT_PLAN="1")
    q = np.ones((5, 8))
    forward = cf.explain(q, q, q).partition("backward:")[0]
    assert said.split() == 2 * forward.split()
    assert not run_python(code, SHARED_CACHE)
