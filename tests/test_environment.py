"""Processes that are not as usual: no standard error, strict NumPy, settings of Numba, no home."""

import importlib
import io
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import cupy_flash as cf
from cupy_flash import reference
from cupy_flash.backends.cuda import probe

attention_module = importlib.import_module("cupy_flash.attention")
ROOT = Path(__file__).parents[1]
# A kernel that compiles in no time, through all that the real ones go through.
SMALL = """
    import numpy as np
    from cupy_flash.backends.cpu import jit

    def double(x):
        for i in range(x.size):
            x[i] *= 2

    def call():
        x = np.ones(3)
        jit.kernel(double)(x)
        assert np.all(x == 2)
"""


def python(*code, **environment):
    """A finished interpreter without settings of Numba but those given."""
    inherited = {name: value for name, value in os.environ.items()
                 if not name.startswith(("NUMBA_", "XDG_"))}
    return subprocess.run([sys.executable, "-c", "\n".join(map(textwrap.dedent, code))], cwd=ROOT,
                          text=True, capture_output=True, env=inherited | environment)


SPOILT = {
    "none": "import sys; sys.stderr = None",
    "closed": "import sys; sys.stderr.close()",
    "descriptor closed": "import os; os.close(2)",
    "full disk": "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 2)",
    "broken pipe": "import os; r, w = os.pipe(); os.close(r); os.dup2(w, 2)",
    "a stream that raises": """
        import sys
        class Stream:
            def write(self, text):
                raise RuntimeError("not in this thread")
            def flush(self):
                pass
        sys.stderr = Stream()
    """,
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_what_cannot_be_said_is_dropped(spoil, tmp_path):
    """Notices and warnings; never to standard output, and the exit status stays what it is."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = python(SMALL, spoil, f"""
        import os
        call()                                              # a notice
        os.environ["NUMBA_CACHE_DIR"] = {str(blocked)!r}
        call()                                              # and a warning, as nothing is kept
        print("through")
    """, NUMBA_CACHE_DIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "through\n"), done.stderr


@pytest.mark.parametrize("kind", ["none", "closed"])
def test_plans_that_cannot_be_printed_are_dropped(kind, monkeypatch, capsys):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", None if kind == "none" else closed)
    monkeypatch.setattr(attention_module, "_PRINTS_PLANS", True)
    x = np.ones((3, 4))
    assert np.all(cf.attention(x, x, x) == 1)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("other", [-95.0, -720.0, -1000.0, -3e38, 3e38, 1e-40, np.inf, -np.inf,
                                   np.nan])
def test_merging_is_no_matter_of_errstate(dtype, other):
    """A weight that becomes 0, and a part without keys, are no errors."""
    wide = np.promote_types(dtype, np.float32)
    outs = [np.full((2, 3, 4), value, dtype) for value in (1, 6e-8)]
    lses = [np.zeros((2, 3), wide), np.full((2, 3), other, wide)]
    for order in (slice(None), slice(None, None, -1)):
        with np.errstate(all="ignore"):
            want = cf.merge(outs[order], lses[order])
        with np.errstate(all="raise"):
            got = cf.merge(outs[order], lses[order])
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


def test_no_function_is_a_matter_of_errstate():
    """Scores of hundreds, hidden keys and empty rows, as the baseline meets them too."""
    rng = np.random.default_rng(0)
    x = (9 * rng.standard_normal((2, 33, 8))).astype(np.float32)
    bias = np.zeros((33, 33), np.float32)
    bias[:, ::3], bias[::2, 1::3] = -np.inf, -1e30
    for options in ({"causal": True, "q_offset": -9}, {"bias": bias}, {"softcap": 1e-30},
                    {"alibi_slopes": np.float32([0.5, 1e3])}, {"kv_lens": np.int32([5])}):
        with np.errstate(all="raise"):
            out, pullback = cf.attention_vjp(x, x, x, **options)
            pullback(out)
            cf.explain(x, x, x, **options)
            reference.attention(x, x, x, **options)
            reference.baseline(x, x, x, **options)
            reference.attention_backward(x, x, x, x, **options)
            reference.baseline_backward(x, x, x, x, out_dtype=np.float16, **options)


def test_numba_that_does_not_compile_is_named(tmp_path):
    done = python("""
        import cupy_flash as cf, numpy as np
        from cupy_flash.cli import main
        x = np.ones((3, 4))
        for _ in range(2):
            try:
                cf.attention(x, x, x)
            except RuntimeError as error:
                print(error)
        main(["info"])
    """, NUMBA_DISABLE_JIT="1", NUMBA_CACHE_DIR=str(tmp_path))
    first, second, *report = done.stdout.splitlines()
    assert first == second and first.startswith("NUMBA_DISABLE_JIT is set")
    assert "unset NUMBA_DISABLE_JIT" in first and done.stderr == ""
    assert any(f"cannot be compiled: {first}" in line for line in report)


def test_settings_of_numba_that_somebody_else_made(tmp_path):
    """What Numba does with them is its matter; the kernels compile and compute."""
    done = python(SMALL, "call()", NUMBA_CACHE_DIR=str(tmp_path), NUMBA_OPT="fast",
                  NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="", NUMBA_BOUNDSCHECK="1",
                  NUMBA_CACHE_LOCATOR_CLASSES="NoSuchLocator", NUMBA_DEBUG_CACHE="1",
                  NUMBA_ENABLE_AVX="no", NUMBA_CAPTURED_ERRORS="new_style")
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.rglob("*.kernel"))) == 1


NO_HOME = """
    import os, pwd
    def nobody(uid):
        raise KeyError("uid not found")
    pwd.getpwuid = nobody
    os.environ.pop("HOME", None)
"""


def test_without_a_home_folder_it_says_where_a_cache_could_be():
    done = python(NO_HOME, SMALL, "call(); call()\nfrom cupy_flash.cli import main\nmain(['info'])")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no home folder is known") == 1
    assert "Set NUMBA_CACHE_DIR or XDG_CACHE_HOME" in done.stderr
    assert done.stdout.count("set NUMBA_CACHE_DIR or XDG_CACHE_HOME") == 1


def test_cupy_without_a_home_folder(monkeypatch):
    """CuPy puts its cache into a folder `~` of the current one then."""
    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert probe._cache_folder() == "~/.cupy/kernel_cache"


def test_a_cupy_whose_cache_cannot_be_made(tmp_path):
    """CuPy makes the folder when it is imported, and raises what the system says."""
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cache"
    done = python("""
        from cupy_flash.cli import main
        print(main(["info"]), main(["doctor"]))
        from cupy_flash import device
        try:
            device.adopt("q", None)
        except NotImplementedError as error:
            print(error)
    """, CUPY_CACHE_DIR=str(folder))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"CuPy cannot be imported, as {folder} cannot be made") == 2
    assert "to mend it: export CUPY_CACHE_DIR=" in done.stdout and "\n0 1\n" in done.stdout
    assert "`q` is on a GPU, and CuPy, which computes there, cannot be imported" in done.stdout
