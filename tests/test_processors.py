"""How many threads there are to be: the environment, the affinity, quotas of pretended cgroups."""

import subprocess
import sys
from pathlib import Path

import pytest

from cupy_flash import processors

ROOT = Path(__file__).parents[1]
V2 = "31 23 0:28 {inside} {point} rw,nosuid - cgroup2 cgroup rw,nsdelegate\n"
V1 = "32 31 0:29 {inside} {point} rw,relatime - cgroup cgroup rw,{controllers}\n"


@pytest.fixture
def pretend(tmp_path, monkeypatch):
    """A system with 128 processors and these files; returns its root."""
    monkeypatch.delenv("NUMBA_NUM_THREADS", raising=False)
    monkeypatch.setattr(processors, "_usable", lambda: 128)

    def make(cgroup, mountinfo, **files):
        texts = {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mountinfo, **files}
        for name, text in texts.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


def mounted(inside="/", point="/sys/fs/cgroup"):
    return V2.format(inside=inside, point=point)


@pytest.mark.parametrize(("text", "count"), [
    ("200000 100000\n", 2), ("150000 100000\n", 2), ("10000 100000\n", 1), ("max 100000\n", 128),
    ("25600000 100000\n", 128), ("nonsense\n", 128), ("", 128),
])
def test_a_quota_of_version_2(pretend, text, count):
    root = pretend("0::/\n", mounted(), **{"sys/fs/cgroup/cpu.max": text})
    assert processors.threads(root) == count


def test_the_smallest_quota_up_to_the_root_counts(pretend):
    base = "sys/fs/cgroup"
    root = pretend("0::/pod/app/job\n", mounted(), **{
        f"{base}/pod/cpu.max": "300000 100000", f"{base}/pod/app/cpu.max": "max 100000",
        f"{base}/pod/app/job/cpu.max": "900000 100000", f"{base}/other/cpu.max": "100000 100000"})
    assert processors.threads(root) == 3


def test_a_container_that_sees_its_own_group_alone(pretend):
    root = pretend("0::/docker/1f\n", mounted("/docker/1f"),
                   **{"sys/fs/cgroup/cpu.max": "400000 100000"})
    assert processors.threads(root) == 4
    root = pretend("0::/../other\n", mounted())         # above what its namespace shows
    assert processors.threads(root) == 4


def test_a_mount_point_with_a_space(pretend):
    root = pretend("0::/a b\n", mounted(point="/c\\040d"), **{"c d/a b/cpu.max": "500000 100000"})
    assert processors.threads(root) == 5


@pytest.mark.parametrize(("quota", "count"), [("250000", 3), ("-1", 128)])
def test_a_quota_of_version_1(pretend, quota, count):
    mounts = (V1.format(inside="/", point="/sys/fs/cgroup/memory", controllers="memory")
              + V1.format(inside="/", point="/sys/fs/cgroup/cpu", controllers="cpu,cpuacct"))
    folder = "sys/fs/cgroup/cpu/job"
    root = pretend("4:memory:/job\n3:cpuset:/other\n2:cpu,cpuacct:/job\n0::/\n", mounts, **{
        f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/memory/job/cpu.max": "100000 100000"})
    assert processors.threads(root) == count


def test_no_cgroups(tmp_path, monkeypatch):
    monkeypatch.delenv("NUMBA_NUM_THREADS", raising=False)
    monkeypatch.setattr(processors, "_usable", lambda: 7)
    assert processors.threads(tmp_path) == 7
    assert processors.quota(tmp_path) is None


@pytest.mark.parametrize(("said", "count"), [
    ("3", 3), (" 2 ", 2), ("2_0", 20), ("", 128), ("auto", 128), ("2.0", 128), ("abc", 128),
])
def test_the_environment_means_what_it_means_to_numba(pretend, monkeypatch, said, count):
    root = pretend("", "")
    monkeypatch.setenv("NUMBA_NUM_THREADS", said)
    assert processors.threads(root) == count


@pytest.mark.parametrize("said", ["0", "-3"])
def test_a_number_below_one_is_refused(monkeypatch, said):
    monkeypatch.setenv("NUMBA_NUM_THREADS", said)
    with pytest.raises(ValueError, match=f"NUMBA_NUM_THREADS is '{said}', expected a whole number"):
        processors.threads()


def test_the_refusal_comes_before_numba_has_one_of_its_own():
    code = ("import os; os.environ['NUMBA_NUM_THREADS'] = '0'\n"
            "import numpy, cupy_flash; x = numpy.ones((2, 8)); cupy_flash.attention(x, x, x)")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "the environment variable NUMBA_NUM_THREADS is '0'" in done.stderr.splitlines()[-1]
