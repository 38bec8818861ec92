"""Each example runs and keeps what it promises."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
from numerics import assert_as_accurate_as_baseline

import cupy_flash as cf

FOLDER = Path(__file__).resolve().parents[1] / "examples"


def load(name):
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested():
    tested = set(re.findall(r'load\("(\w+)"\)', Path(__file__).read_text()))
    assert tested == {path.stem for path in FOLDER.glob("*.py")}


def test_language_model_writes_the_same_text(capsys):
    example = load("language_model")
    example.main(["--tokens", "150"])       # past 128, the model starts a new window of context
    text = capsys.readouterr().out
    assert text.count("all 150 tokens are identical") == 2
    assert text.count("Alice was beginning to") == 2 and text.count("Capitu olhou para") == 2
    assert example.attention_layer.calls == 4 * 150


def test_language_model_notices_a_wrong_attention(monkeypatch):
    example, right = load("language_model"), cf.attention
    monkeypatch.setattr(cf, "attention", lambda q, k, v, causal: right(q, k, v, scale=0.0))
    with pytest.raises(AssertionError, match="the texts differ"):
        example.main(["--tokens", "20"])


def test_language_model_restores_the_original():
    example = load("language_model")
    original = example.Attention.__call__
    with pytest.raises(ZeroDivisionError), example.replaced_attention():
        assert example.Attention.__call__ is example.attention_layer
        raise ZeroDivisionError
    assert example.Attention.__call__ is original


def test_own_autograd(capsys):
    assert load("own_autograd").main() < 0.1
    assert "differ by at most" in capsys.readouterr().out


def test_kernel_density_of_a_cloud_far_from_zero():
    """In float32 as exact around 1000 as around 0: against itself in float64, on the same data."""
    log_density = load("kernel_density").log_density
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


def test_kernel_density_is_near_the_truth(capsys):
    error, shift = load("kernel_density").main(n=20_000)
    assert error < 0.25 and shift < 0.25
    assert "log density at 500 of 20,000 points" in capsys.readouterr().out


def test_kernel_density_gradient():
    log_density = load("kernel_density").log_density
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


if importlib.util.find_spec("jax"):
    import jax

    @pytest.fixture(params=[False, True], ids=["x32", "x64"])
    def x64(request):
        """Whether JAX computes in float64 where nothing else is said."""
        before = jax.config.jax_enable_x64
        jax.config.update("jax_enable_x64", request.param)
        yield request.param
        jax.config.update("jax_enable_x64", before)

    def test_jax_adapter(x64):
        value, gradient = load("jax_adapter").main()
        assert value < 1e-2 and gradient < 1e-5     # JAX's own has float32 scores in either case

    @pytest.mark.parametrize("shape", [(2, 4, 30, 8), (4, 30, 8), (30, 8)])
    def test_jax_adapter_under_vmap(x64, shape):
        """Values and gradients of each element, with one q for all keys as well."""
        attention = load("jax_adapter").attention
        q, k, v = (jax.random.normal(key, (3, *shape)) for key in
                   jax.random.split(jax.random.key(1), 3))
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
