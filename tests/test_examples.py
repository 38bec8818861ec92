"""Each example runs and keeps what it promises, where the packages that it needs are installed."""

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from numerics import assert_as_accurate_as_baseline

FOLDER = Path(__file__).resolve().parents[1] / "examples"


@cache
def run(name):
    """What an example has defined at its end; its pictures go nowhere."""
    plt.switch_backend("agg")
    try:
        found = runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        assert plt.get_fignums(), f"{name} draws nothing"
        return found
    finally:
        plt.close("all")


@pytest.fixture(autouse=True)
def _no_window(monkeypatch):
    """`plt.show()` shows nothing here."""
    monkeypatch.setattr(plt, "show", lambda: None)


def installed(*modules):
    return all(importlib.util.find_spec(module) for module in modules)


def test_every_example_is_tested():
    tested = re.findall(r'run\("(\w+)"\)|"(\w+)\.py"', Path(__file__).read_text())
    examples = {path.stem for path in FOLDER.glob("*.py")} - {"mpi_ranks"}
    assert {a or b for a, b in tested} == examples


def test_every_example_has_a_title_and_uses_a_gpu_where_there_is_one():
    for path in FOLDER.glob("*.py"):
        text = path.read_text()
        if path.stem != "mpi_ranks":
            title = re.match(r'r?"""\n(.+)\n(=+)\n', text)
            assert title and len(title[1]) == len(title[2]), path.name
        assert "cupy.is_available()" in text or path.stem == "jax_attention", path.name


def test_language_model_writes_the_same_text():
    example = run("language_model")
    assert example["TOKENS"] == 150 and len(example["calls"]) == 4 * 150
    assert example["text"].startswith("Alice was beginning to")
    assert np.allclose(example["weights"].sum(axis=1), 1, atol=1e-5)


def test_language_model_notices_a_wrong_attention(monkeypatch):
    example = run("language_model")
    right = example["cf"].attention
    monkeypatch.setattr(example["cf"], "attention",
                        lambda *x, **options: right(*x, **options | {"scale": 0.0}))
    with pytest.raises(AssertionError, match="the texts differ"):
        example["same_text"]("en", 20)


def test_language_model_restores_the_original():
    example = run("language_model")
    layer = example["Attention"]
    original = layer.__call__
    with pytest.raises(ZeroDivisionError), example["replaced_attention"]():
        assert layer.__call__ is not original
        raise ZeroDivisionError
    assert layer.__call__ is original


def test_own_autograd():
    example = run("own_autograd")
    assert example["difference"] < 1e-5 * example["largest"] and example["losses"][-1] < 0.1


def test_kernel_density_of_a_cloud_far_from_zero():
    """In float32 as exact around 1000 as around 0: against itself in float64, on the same data."""
    log_density = run("kernel_density")["log_density"]
    rng = np.random.default_rng(0)
    near, errors = rng.standard_normal((3000, 3), dtype=np.float32), []
    for shift in (np.float32(0), np.float32(1000)):
        samples = near + shift
        got = log_density(samples[:200], samples, 0.5)
        wide = samples.astype(np.float64)
        want = log_density(wide[:200], wide, 0.5)
        errors.append([a - b for a, b in zip(got, want, strict=True)])
        for name, a, b, error in zip(("value", "gradient"), got, want, errors[0], strict=True):
            assert a.dtype == np.float32
            assert_as_accurate_as_baseline(name, a, b, [(b, b + error)])


def test_kernel_density_is_near_the_truth():
    example = run("kernel_density")
    assert example["error"] < 0.1 and np.median(example["arrived"]) < 0.02


def test_kernel_density_gradient():
    log_density = run("kernel_density")["log_density"]
    rng = np.random.default_rng(1)
    samples, points = rng.standard_normal((200, 3)), rng.standard_normal((5, 3))
    value, gradient = log_density(points, samples, 0.7)
    distance = np.sum((points[:, None] - samples) ** 2, axis=2)
    kernel = np.exp(-distance / (2 * 0.7**2)) / (2 * np.pi * 0.7**2) ** 1.5
    assert np.allclose(value, np.log(kernel.mean(axis=1)), rtol=1e-12)
    for axis in range(3):
        step = 1e-5 * np.eye(3)[axis]
        up, down = (log_density(points + sign * step, samples, 0.7)[0] for sign in (1, -1))
        assert np.allclose(gradient[:, axis], (up - down) / 2e-5, atol=1e-8)


def test_kernel_regression():
    example = run("kernel_regression")
    losses = [loss for _, loss in example["path"]]
    assert losses[-1] - min(losses) < 1e-5 < losses[0] / 1000
    assert example["difference"] < 1e-4 and example["error"] < 0.1
    step = 1e-3
    up, down = (example["loss_and_slope"](0.2 * np.exp(sign * step))[0] for sign in (1, -1))
    assert np.isclose(example["loss_and_slope"](0.2)[1], (up - down) / (2 * step), rtol=0.02)


def test_pair_bias():
    example = run("pair_bias")
    assert max(example["difference"].values()) < 1e-4
    assert example["losses"][-1] < example["losses"][0] / 1000
    assert example["peak"] < example["plain_peak"] / 4


def test_attention_weights():
    assert max(map(float, run("attention_weights")["differences"].values())) < 1e-5


if installed("ot"):

    def test_sinkhorn():
        """Against POT, and a divergence that is 0 between equal clouds and grows with a shift."""
        example = run("sinkhorn")
        assert abs(example["ours"] - example["theirs"]) < 1e-5
        x = np.random.default_rng(0).standard_normal((300, 2))
        costs = [example["transport"](x, x + shift, 0.5, 100)[0]
                 - example["self_transport"](x, 0.5, 100)[0] for shift in (0, np.array([1.0, 0.0]))]
        # Of a shifted cloud it is half of the square of the shift, whatever the blur.
        assert abs(costs[0]) < 1e-9 and abs(costs[1] - 0.5) < 1e-6


if installed("distributed", "mpi4py"):

    def test_sharded_keys():
        """In a process of its own: Dask's workers and MPI's ranks are started from it."""
        result = subprocess.run([sys.executable, FOLDER / "sharded_keys.py"], capture_output=True,
                                text=True, env=environment(), timeout=120)
        assert result.returncode == 0, result.stderr
        apart = re.findall(r"(?:out|dq|dk)(?: differs)? by (\S+?)[,\n]", result.stdout)
        assert len(apart) == 6 and all(float(x) < 1e-6 for x in apart)

    def environment():
        """Without windows, and with this checkout."""
        return os.environ | {"MPLBACKEND": "agg", "PYTHONPATH": str(FOLDER.parent)}


if installed("jax"):
    import jax

    @pytest.fixture(params=[False, True], ids=["x32", "x64"])
    def x64(request):
        """Whether JAX computes in float64 where nothing else is said."""
        before = jax.config.jax_enable_x64
        jax.config.update("jax_enable_x64", request.param)
        yield request.param
        jax.config.update("jax_enable_x64", before)

    def normal(*shapes, dtype=None, seed=1):
        keys = jax.random.split(jax.random.key(seed), len(shapes))
        return [jax.random.normal(key, shape, dtype or float)
                for key, shape in zip(keys, shapes, strict=True)]

    def test_jax_attention(x64):
        """Against JAX's own, which has float32 scores in either case."""
        differences = run("jax_attention")["compare"]()
        assert set(differences) == {"eager", "jit"}
        assert all(max(found) < 1e-4 for found in differences.values())

    @pytest.mark.parametrize("shape", [(2, 4, 30, 8), (4, 30, 8), (30, 8)])
    def test_jax_attention_under_vmap(x64, shape):
        """Values and gradients of each element, with one q for all keys as well."""
        attention = run("jax_attention")["attention"]
        q, k, v = normal(*[(3, *shape)] * 3)
        grad = jax.grad(lambda *x: jax.numpy.sum(jax.numpy.sin(attention(*x))), (0, 1, 2))
        for f in (attention, grad):
            alone = jax.tree.leaves(jax.jit(jax.vmap(f))(q, k, v))
            shared = jax.tree.leaves(jax.vmap(f, (None, 0, 0))(q[0], k, v))
            for i in range(3):
                for a, b in zip(alone, jax.tree.leaves(f(q[i], k[i], v[i])), strict=True):
                    assert a.dtype == (np.float64 if x64 else np.float32)
                    assert np.array_equal(a[i], b)
                for a, b in zip(shared, jax.tree.leaves(f(q[0], k[i], v[i])), strict=True):
                    assert np.array_equal(a[i], b)

    def test_jax_attention_with_every_operand(x64):
        """Mask, bias, lengths and a traced scale: eagerly and under jit, values and gradients."""
        attention = run("jax_attention")["attention"]
        q, k, v, bias = normal((2, 4, 9, 8), (2, 2, 7, 8), (2, 2, 7, 5), (4, 1, 7))
        mask = jax.numpy.arange(7) != 3
        lens = np.int32([7, 4])

        def loss(q, k, v, bias, scale):
            out = attention(q, k, v, mask, bias, scale=scale, kv_lens=jax.numpy.asarray(lens),
                            q_lens=jax.numpy.asarray(lens), causal=True)
            return jax.numpy.sum(jax.numpy.sin(out))

        arrays = q, k, v, bias, jax.numpy.asarray(0.3)
        eager = jax.value_and_grad(loss, (0, 1, 2, 3, 4))(*arrays)
        jitted = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3, 4)))(*arrays)
        assert all(np.allclose(a, b, atol=1e-6) for a, b in
                   zip(*map(jax.tree.leaves, (eager, jitted)), strict=True))
        step = 1e-3
        up, down = (loss(q, k, v, bias, jax.numpy.asarray(0.3 + x)) for x in (step, -step))
        assert np.isclose(eager[1][4], (up - down) / (2 * step), rtol=1e-2, atol=1e-3)

    def test_jax_attention_is_never_compiled_for_a_gpu(monkeypatch):
        """An error that says what to do; and where that is got round, no program all the same."""
        example = run("jax_attention")
        attention, (q, k, v) = example["attention"], normal(*[(2, 9, 8)] * 3)
        assert example["_traced_for"]() == "cpu"
        with pytest.raises(NotImplementedError, match="not found for platform cuda"):
            jax.export.export(jax.jit(attention), platforms=["cuda"])(q, k, v)
        monkeypatch.setitem(example["_call"].__globals__, "_traced_for", lambda: "gpu")
        for f in (jax.jit(lambda *x: attention(*x)), jax.vmap(lambda *x: attention(*x)),
                  jax.jit(jax.grad(lambda *x: attention(*x).sum()))):
            with pytest.raises(NotImplementedError, match=r"under jit.*call it eagerly"):
                f(q, k, v)
        attention(q, k, v)
        with jax.default_device(jax.devices("cpu")[0]):
            monkeypatch.undo()
            jax.jit(lambda *x: attention(*x))(q, k, v)
