"""The documents: their code runs, their commands exist, their pictures can be drawn."""

import configparser
import contextlib
import doctest
import importlib.util
import io
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from conftest import GPU_MISSING
from matplotlib.figure import Figure

import cupy_flash as cf
from cupy_flash.bind import Options
from cupy_flash.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.__main__ import COMMANDS as MEASURES  # noqa: E402

DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```(\{?[\w-]*\}?)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Blocks that need a package of no extra run where it is installed, in a test of that package.
ELSEWHERE = re.compile(r"^\s*import (torch|jax)\b", re.MULTILINE)


def blocks(path):
    """(language, text) of each code block of a Markdown file."""
    return BLOCK.findall(path.read_text())


PAGES = [path for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md",
                           ROOT / "bench" / "README.md", *sorted(DOCS.glob("*.md")))
         if blocks(path)]


@pytest.fixture
def anywhere(monkeypatch, tmp_path):
    """A folder that may be written to; where there is no GPU, NumPy stands in for CuPy."""
    monkeypatch.chdir(tmp_path)
    if GPU_MISSING is not None:
        monkeypatch.setitem(sys.modules, "cupy", np)
    for folder in (ROOT, DOCS, DOCS / "pictures"):
        monkeypatch.syspath_prepend(str(folder))


def run_page(path):
    """Run the code of a page, in order and in one namespace, as a reader would."""
    names, runner = {}, doctest.DocTestRunner(
        verbose=False, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for i, (language, text) in enumerate(blocks(path)):
        if language == "python" and not ELSEWHERE.search(text):
            exec(compile(text, f"{path.name}, block {i}", "exec"), names)
        elif language == "pycon":
            test = doctest.DocTestParser().get_doctest(text, names, path.name, path.name, 0)
            report = io.StringIO()
            runner.run(test, out=report.write, clear_globs=False)
            names.update(test.globs)
            assert runner.failures == 0, report.getvalue()
        elif language == "{computed}":
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(text, f"{path.name}, block {i}", "exec"), {})
            assert printed.getvalue().strip(), f"{path.name}, block {i} prints nothing"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_code_runs(path, anywhere):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_page(path)


def test_a_wrong_output_is_found(tmp_path, anywhere):
    page = tmp_path / "page.md"
    for text in (">>> 1 + 1\n3\n",
                 ">>> 1 / 0\nTraceback (most recent call last):\nTypeError: no\n"):
        page.write_text(f"```pycon\n{text}```\n")
        with pytest.raises(AssertionError, match="Expected"):
            run_page(page)
    page.write_text("```{computed}\nx = 1\n```\n")
    with pytest.raises(AssertionError, match="prints nothing"):
        run_page(page)


def test_languages_are_known():
    """What is no text is run or checked here."""
    known = {"", "text", "sh", "python", "pycon", "{computed}", "{eval-rst}", "{toctree}"}
    assert {language for path in PAGES for language, _ in blocks(path)} <= known


def commands():
    """Each line of the shell in the documents."""
    for path in PAGES:
        for language, text in blocks(path):
            if language in ("sh", ""):
                for line in text.splitlines():
                    yield path.name, line.split("#")[0].strip()


def test_numbers_in_tables_hold_together(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS / "extensions"))
    from unbroken import unbroken

    hyphen, space = "\N{NON-BREAKING HYPHEN}", "\N{NO-BREAK SPACE}"
    assert unbroken("| 1e-16 | 421 ±4 % | `1e-16` |\n1e-16 and 4 %\n") == (
        f"| 1e{hyphen}16 | 421{space}±4{space}% | `1e-16` |\n1e-16 and 4 %\n")
    assert unbroken("| 3.2 MiB | FlashAttention-2 | [a-b](c.md#are-0) | two-step |") == (
        f"| 3.2{space}MiB | FlashAttention{hyphen}2 | [a-b](c.md#are-0) | two-step |")


def test_commands_exist():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = set(config["options.extras_require"])
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    found = 0
    for page, line in commands():
        for word in re.findall(r"-m cupy_flash (\w+)", line):
            assert word in COMMANDS, f"{page}: {line}"
            found += 1
        for word in re.findall(r"^make (\w+)", line):
            assert word in targets, f"{page}: {line}"
        for word in re.findall(r'pip install "\.\[(.*?)\]"', line):
            assert set(word.split(",")) <= extras, f"{page}: {line}"
        for word in re.findall(r"-m bench ([\w-]+)", line):
            assert word in MEASURES, f"{page}: {line}"
        for word in re.findall(r"python ((?:examples|tests)/[\w./]+)", line):
            assert (ROOT / word).exists(), f"{page}: {line}"
    assert found >= 5


def pictures():
    """Scripts that the documents draw."""
    return sorted({name for path in PAGES for language, text in blocks(path)
                   if language == "{eval-rst}" for name in re.findall(r"plot:: (\S+)", text)})


@pytest.mark.parametrize("name", pictures())
def test_pictures_are_drawn(name, anywhere, monkeypatch):
    import matplotlib.pyplot as plt

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    plt.switch_backend("agg")
    try:
        runpy.run_path(str(DOCS / "pictures" / name))
        assert plt.get_fignums()
        for number in plt.get_fignums():
            figure = plt.figure(number)
            assert isinstance(figure, Figure) and figure.axes
            plt.savefig(io.BytesIO())
    finally:
        plt.close("all")


def test_every_picture_has_words():
    """An `alt` text, for those who do not see it."""
    for path in PAGES:
        for language, text in blocks(path):
            if language == "{eval-rst}":
                assert text.count("plot::") == text.count(":alt:"), path.name


def test_the_pictures_of_masks_show_what_is_computed(anywhere):
    spec = importlib.util.spec_from_file_location("grid", DOCS / "pictures" / "grid.py")
    grid = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(grid)
    P = grid.weights(3, 6, causal=True)
    assert np.array_equal(P > 0, np.tri(3, 6, 3, dtype=bool))
    assert not grid.weights(6, 3, causal=True)[:3].any()


class OnGpu:
    """An array on a GPU, for those who ask by protocol."""

    __cuda_array_interface__ = {"shape": (7, 8), "typestr": "<f4", "data": (1, False),  # noqa: RUF012
                                "version": 3}


def test_first_mistakes_are_quoted_as_they_come(monkeypatch):
    """Whoever searches the pages for the words of a message finds the table."""
    page = (DOCS / "start.md").read_text().partition("## First mistakes")[2]
    quoted = re.findall('"([^"|\n]+)"', page.partition("\n\nA message")[0])
    x = np.zeros((7, 8), np.float32)
    monkeypatch.setitem(sys.modules, "cupy", None)
    calls = [lambda: cf.attention(*[np.zeros((2, 7, 512), np.float32)] * 3),
             lambda: cf.attention(x, x, x, mask=np.ones((7, 7), int)),
             lambda: cf.attention(x, x, x, mask=np.zeros((7, 7), np.float32)),
             lambda: cf.attention(x, x.astype(float), x),
             lambda: cf.attention(OnGpu(), x, x),
             lambda: cf.attention(*[OnGpu()] * 3)]
    assert len(quoted) == len(calls) + 1        # the name of a package in quotes
    for words, call in zip(quoted, calls, strict=False):
        with pytest.raises((TypeError, ValueError, NotImplementedError)) as raised:
            call()
        assert all(part in str(raised.value) for part in words.split(" ... ")), words


def test_options_at_a_glance_are_all():
    page = (DOCS / "api.md").read_text()
    first = page.partition("## Options at a glance")[2].partition("And those of single")[0]
    rows = re.findall(r"^\| (`.*?`) \|", first, re.MULTILINE)
    assert {word for row in rows for word in re.findall(r"`(\w+)`", row)} == {*Options._fields}
    documented = set(re.findall(r"autofunction:: (\w+)|autoclass:: (\w+)", page))
    assert {a or b for a, b in documented} == {name for name in cf.__all__ if name[0] != "_"}


def test_variables_of_the_environment_are_all():
    page = (DOCS / "running.md").read_text()
    source = "".join(path.read_text() for path in (ROOT / "cupy_flash").rglob("*.py"))
    ours = set(re.findall(r"CUPY_FLASH_[A-Z_]+", source))
    assert ours and ours <= set(re.findall(r"CUPY_FLASH_[A-Z_]+", page))
    assert set(COMMANDS) <= set(re.findall(r"-m cupy_flash (\w+)", page))


def test_records_of_a_cpu_are_old_once_its_kernels_have_changed(anywhere, tmp_path, monkeypatch):
    import tables

    def git(*words):
        return subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x", "-C", tmp_path,
                               *words], capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    commits = []
    for name, text in (("kernel.py", "1"), ("other.py", "2"), ("kernel.py", "3")):
        (tmp_path / name).write_text(text)
        git("add", ".")
        git("commit", "-q", "-m", "x")
        commits.append(git("rev-parse", "HEAD"))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    assert [tables.changed_since(one, "kernel.py") for one in commits] == [True, True, False]
    assert tables.changed_since(f"{commits[0]}-dirty", "kernel.py")
    assert not tables.changed_since("0" * 12, "kernel.py")          # where the history ends earlier
    monkeypatch.setenv("PATH", "")
    assert not tables.changed_since(commits[0][:9], "kernel.py")


def test_the_readme_has_the_numbers_of_the_records(anywhere):
    import tables

    from bench import charts

    text = (ROOT / "README.md").read_text()
    assert tables.errors() in text, "write docs/tables.py's `errors()` into the README"
    lines = charts.speed_records(family="16-bit", kind="bfloat16")
    for direction in ("forward", "backward"):
        found = tables.ratios(one["ratio"] for one in lines if one["direction"] == direction)
        assert f"{direction} {found}" in text, f"the README should have {direction} {found}"
    cpu = re.findall(r"\*\*([\d.]+)\*\*", tables.cpu_speed())
    assert f"by {min(cpu)} to {max(cpu)} in the mean" in " ".join(text.split())
    assert charts.stamp() in (DOCS / "images" / "speed.svg").read_text(), (
        "draw it again: python -m bench charts")
