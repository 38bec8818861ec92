"""The package works from a wheel, from an editable install and from a bare checkout."""

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "cuda_src"
REPORT = """
import json, sys
import cupy_flash
from cupy_flash.backends.cuda import source
contents = {name: (source.folder() / name).read_bytes().hex() for name in source.names()}
print(json.dumps({"package": cupy_flash.__file__, "version": cupy_flash.__version__,
                  "folder": str(source.folder()), "contents": contents,
                  "digest": source.digest()}))
"""


def run(*command, **options):
    """Run a command; show what it printed when it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= options.pop("env", {})
    result = subprocess.run(list(map(str, command)), env=environment, capture_output=True,
                            text=True, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what is under version control: building leaves traces in the folder."""
    copy = tmp_path_factory.mktemp("checkout") / "copy"
    traces = shutil.ignore_patterns("__pycache__", "*.egg-info", "_build", "gallery")
    for name in ("cupy_flash", "cuda_src", "tests", "docs", "examples", "bench"):
        shutil.copytree(ROOT / name, copy / name, ignore=traces)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory):
    """The wheel, built with the installed setuptools: no network is needed."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
        "--wheel-dir", folder, checkout)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture
def new_venv(tmp_path):
    """The Python of a new environment that sees this one's packages behind its own."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # A path in a .pth file is searched last, and the .pth files in it are not followed: an
    # editable install of cupy_flash in the outer environment stays out of sight.
    (Path(site) / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def install(python, *what):
    """Install into another environment with this one's pip."""
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps",
        "--no-index", "--no-build-isolation", *what)


def report(python, folder, **env):
    """What a new process in another folder finds."""
    return json.loads(run(python, "-c", REPORT, cwd=folder, env=env))


def assert_sources_are_the_checkouts(found):
    """Names and contents, byte for byte, and the digest, which depends on nothing else."""
    paths = [path for path in SOURCES.rglob("*") if path.suffix in (".cu", ".cuh")]
    assert found["contents"] == {path.relative_to(SOURCES).as_posix(): path.read_bytes().hex()
                                 for path in paths}
    assert paths and found["digest"] == report(sys.executable, ROOT, PYTHONPATH=".")["digest"]


def test_wheel(wheel, new_venv, tmp_path):
    install(new_venv, wheel)
    found = report(new_venv, tmp_path)
    assert Path(found["package"]).is_relative_to(new_venv.parents[1])
    assert Path(found["folder"]) == Path(found["package"]).parent / "cuda_src"
    assert_sources_are_the_checkouts(found)
    command = new_venv.parent / "cupy-flash"
    assert found["version"] in run(command, "info", cwd=tmp_path)


def test_editable_install(checkout, new_venv, tmp_path):
    install(new_venv, "--editable", checkout)
    for folder in (tmp_path, checkout):
        found = report(new_venv, folder)
        assert Path(found["package"]) == checkout / "cupy_flash" / "__init__.py"
        assert Path(found["folder"]) == checkout / "cuda_src"
        assert_sources_are_the_checkouts(found)


def test_bare_checkout(checkout, new_venv, tmp_path):
    for folder, path in ((tmp_path, checkout), (checkout, ".")):
        found = report(new_venv, folder, PYTHONPATH=str(path))
        assert Path(found["package"]) == checkout / "cupy_flash" / "__init__.py"
        assert_sources_are_the_checkouts(found)


def test_missing_sources_are_named(checkout, new_venv, tmp_path):
    shutil.copytree(checkout / "cupy_flash", tmp_path / "cupy_flash")
    code = "from cupy_flash.backends.cuda import source\nsource.folder()"
    result = subprocess.run([new_venv, "-c", code], cwd=tmp_path, capture_output=True, text=True,
                            env={"PYTHONPATH": str(tmp_path)})
    assert "FileNotFoundError: the CUDA sources of cupy_flash are missing" in result.stderr


def test_digest_sees_every_change(checkout, new_venv, tmp_path):
    copy = tmp_path / "checkout"
    shutil.copytree(checkout, copy)

    def digest():
        return report(new_venv, tmp_path, PYTHONPATH=str(copy))["digest"]

    digests = [digest()]
    header = copy / "cuda_src" / "base.cuh"
    for text in (header.read_text().replace("a / b", "b / a"), header.read_text() + ";\n"):
        header.write_text(text)
        digests.append(digest())
    with header.open("a") as file:
        file.write("\n// A remark that changes no kernel.\n")
    (copy / "cuda_src" / "tile").mkdir(exist_ok=True)
    (copy / "cuda_src" / "tile" / "new.cuh").write_text("")
    digests.append(digest())
    (copy / "cuda_src" / "README.md").write_text("not a source")
    assert len({*digests, digest()}) == len(digests)


def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "cupy_flash").rglob("*.py")}
    sources = {f"cupy_flash/{path.relative_to(ROOT).as_posix()}"
               for path in SOURCES.rglob("*") if path.suffix in (".cu", ".cuh")}
    expected = package | sources | {"cupy_flash/py.typed"}
    assert expected - names == set(), "not in the wheel: is the folder in setup.cfg's packages?"
    others = {name for name in names - expected if ".dist-info/" not in name}
    assert others <= {"cupy_flash/cuda_src/README.md"}
    assert any(name.endswith("/LICENSE") for name in names)


def test_source_archive_is_complete(checkout, tmp_path):
    build = "from setuptools import build_meta as b; import sys; b.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, tmp_path, cwd=checkout)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        sizes = {one.name.split("/", 1)[1]: one.size for one in archive if "/" in one.name}
    names = set(sizes)
    folders, built = ("cuda_src", "tests", "examples", "docs"), {"__pycache__", "_build", "gallery"}
    wanted = {path.relative_to(ROOT).as_posix() for folder in folders
              for path in (ROOT / folder).rglob("*")
              if path.is_file() and not built & {*path.parts}}
    wanted |= {"LICENSE", "README.md", "CHANGELOG.md", "setup.cfg", "pyproject.toml", "Makefile"}
    # Whoever has the archive alone can follow the links of the README.
    wanted |= set(re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text()))
    wanted |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "bench").rglob("*")
               if path.suffix in (".py", ".md", ".jsonl") and path.name != "compare.jsonl"}
    assert wanted - names == set()
    # Records are summaries: those of random problems were once 3 MB.
    records = {name: size for name, size in sizes.items() if name.startswith("bench/results/")}
    assert max(records.values()) < 600_000 and sum(records.values()) < 800_000, records


def test_metadata_asks_for_no_cupy():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    required = config["options"]["install_requires"].split()
    assert sorted(name.split(">")[0] for name in required) == ["numba", "numpy"]
    extras = config["options.extras_require"]
    assert {name for name, value in extras.items() if "cupy-cuda" in value} == {
        "cuda12x", "cuda13x", "test-nogpu"}
    assert "torch" not in str(dict(extras))
