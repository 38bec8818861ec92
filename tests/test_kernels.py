"""The records of kernels: which one a plan takes, which it refuses, and what a user can ask for."""

from dataclasses import replace

import pytest
from test_hopper import HOPPER
from test_plan_cuda import H200, problem

from cupy_flash import device
from cupy_flash.backends.cuda.structs import structs
from cupy_flash.backends.cuda.unit import kernel_named
from cupy_flash.plan import make_plan, tuned
from cupy_flash.plan.cuda import KERNELS, kernel_of
from cupy_flash.plan.kernel import MOST_BLOCKS, ONE_TASK, Candidate, Refusal

CANDIDATES = [kernel for kernel in KERNELS if kernel.direction]
# Which kernel of a family computes a pass.
FAMILIES = {"sm90": ("forward_sm90", "backward_sm90"),
            "sm80": ("forward_sm80", "backward_sm80"),
            "simt": ("forward_simt", "dkdv_simt"),
            "wmma": ("forward_wmma", "dkdv_wmma")}


def large(**changes):
    """A problem that the kernels for sm_90a serve."""
    return problem(**{"batch": 8, **changes})


def entries(direction, p, gpu):
    return [launch.entry for launch in make_plan(direction, p, gpu).launches]


def test_a_record_is_complete():
    assert len({kernel.entry for kernel in KERNELS}) == len(KERNELS)
    for kernel in KERNELS:
        assert kernel.params in structs() and kernel_of(kernel.entry) is kernel
        assert {f"{name}_map" for name in kernel.maps} <= set(structs()[kernel.params].names)
        assert kernel_named(f"{kernel.entry}_bfloat16_d64") is kernel
    assert {kernel.family for kernel in CANDIDATES} == set(FAMILIES)


WIDE, DETERMINISTIC = {"d": 200, "d_v": 200}, {"deterministic": True}
WIDEST = {"d": 256, "d_v": 256}
NARROW = {"d": 3, "d_v": 1}
FLOAT64 = {"dtype": "float64", "out_dtype": "float64"}
FLOAT32 = {"dtype": "float32", "out_dtype": "float32", "precision": "tf32x3"}


@pytest.mark.parametrize("direction, changes, entry, refused", [
    ("forward", {}, "forward_sm90", []),
    ("forward", FLOAT32, "forward_sm80", ["forward_sm90", "forward_simt"]),
    ("forward", {"has_mask": True} | FLOAT32, "forward_sm80", ["forward_sm90", "forward_simt"]),
    ("forward", NARROW | FLOAT32, "forward_simt", ["forward_sm90"]),
    ("forward", WIDE | FLOAT64, "forward_sm80", ["forward_sm90", "forward_simt"]),
    ("backward", {}, "backward_sm90", []),
    ("backward", WIDE, "backward_sm90_wide", ["backward_sm90"]),
    ("backward", FLOAT32, "backward_sm80", ["backward_sm90", "backward_sm90_wide", "dkdv_simt"]),
    ("backward", NARROW | FLOAT64, "dkdv_simt", ["backward_sm90", "backward_sm90_wide"]),
    ("backward", DETERMINISTIC, "dkdv_wmma",
     ["backward_sm90", "backward_sm90_wide", "dkdv_simt", "backward_sm80"]),
], ids=str)
def test_a_plan_takes_the_first_that_offers_and_carries_the_refusals(direction, changes, entry,
                                                                     refused):
    plan = make_plan(direction, large(**changes), HOPPER)
    assert entry in [launch.entry for launch in plan.launches]
    assert [refusal.entry for refusal in plan.refusals] == refused
    assert all(refusal.reason in str(plan) for refusal in plan.refusals)


def test_the_order_of_preference_can_be_another():
    with tuned(kernels=KERNELS[::-1]):
        assert entries("forward", large(), HOPPER) == ["forward_wmma"]
        assert entries("backward", large(), HOPPER)[1] == "dkdv_wmma"


def test_equal_refusals_are_one_line():
    text = str(make_plan("backward", large(), H200))
    first, *others = (line for line in text.splitlines() if line.startswith("  not "))
    assert first.startswith("  not backward_sm90, backward_sm90_wide: it needs sm_90a")
    assert [line.split(":")[0] for line in others] == ["  not dkdv_simt"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_can_be_asked_for(family):
    gpu = replace(HOPPER, family=family)
    changes = NARROW | FLOAT32 if family == "simt" else {}
    for direction, entry in zip(("forward", "backward"), FAMILIES[family], strict=True):
        plan = make_plan(direction, large(**changes), gpu)
        assert entry in [launch.entry for launch in plan.launches] and plan.refusals == ()
        assert f"CUPY_FLASH_KERNELS={family}" in str(plan)


def test_a_family_that_does_not_serve_is_an_error_that_says_why():
    for gpu, family, changes, words in (
            (HOPPER, "sm90", {"dtype": "float64", "out_dtype": "float64"}, "16 bits"),
            (H200, "sm90", {}, "sm_90a"),
            (replace(HOPPER, smem=99 * 1024), "sm80", WIDEST | FLOAT64, "dims"),
            (H200, "simt", FLOAT64, "up to 8"), (H200, "simt", NARROW, "16-bit")):
        with pytest.raises(NotImplementedError, match=f"CUPY_FLASH_KERNELS asks for {family}, .*"
                                                      rf"forward.*: .*{words}.*unset it"):
            make_plan("forward", large(**changes), replace(gpu, family=family))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_family_that_there_is_not_is_an_error(direction):
    with pytest.raises(ValueError, match=r"is 'sm70'.*one of simt, sm80, sm90, wmma"):
        make_plan(direction, large(), replace(H200, family="sm70"))


def test_the_environment_names_the_family(monkeypatch):
    from cupy.cuda import nvrtc, runtime

    properties = {"name": b"H", "major": 9, "minor": 0, "multiProcessorCount": 132,
                  "sharedMemPerBlockOptin": 227 * 1024}
    monkeypatch.setattr(runtime, "getDeviceProperties", lambda number: properties)
    monkeypatch.setattr(nvrtc, "getVersion", lambda: (12, 9))
    found = []
    for given in (None, "", "wmma"):
        monkeypatch.delenv("CUPY_FLASH_KERNELS", raising=False)
        if given is not None:
            monkeypatch.setenv("CUPY_FLASH_KERNELS", given)
        device.gpu.cache_clear()
        found.append(entries("forward", large(), device.gpu(0)))
    assert device.gpu(0).targets == ("90a",)
    device.gpu.cache_clear()
    assert found == [["forward_sm90"], ["forward_sm90"], ["forward_wmma"]]


@pytest.mark.parametrize("arch, version, targets", [
    ((9, 0), (12, 9), ("90a",)), ((9, 0), (12, 8), ()), ((8, 0), (13, 0), ()),
    ((10, 0), (13, 0), ("100a",))])
def test_targets_are_those_of_device_and_compiler(monkeypatch, arch, version, targets):
    from cupy.cuda import nvrtc, runtime

    properties = {"name": b"G", "major": arch[0], "minor": arch[1], "multiProcessorCount": 132,
                  "sharedMemPerBlockOptin": 227 * 1024}
    monkeypatch.setattr(runtime, "getDeviceProperties", lambda number: properties)
    monkeypatch.setattr(nvrtc, "getVersion", lambda: version)
    device.gpu.cache_clear()
    gpu = device.gpu(0)
    device.gpu.cache_clear()
    assert gpu.targets == targets
    assert ("forward_sm90" in entries("forward", large(), gpu)) == ("90a" in targets)


def test_settings_of_plans():
    decode = problem(batch=1, heads_q=8, heads_k=2, Nq=1, Nk=65536)
    with tuned(split_keys=16384):
        few = make_plan("forward", decode, H200).launches[0].splits
    assert few <= 4 < make_plan("forward", decode, H200).launches[0].splits
    with pytest.raises(TypeError, match="no settings split_key"), tuned(split_key=1):
        pass


def test_blocks_with_a_task_each_are_no_more_than_a_grid_has():
    """2^31 tiles of keys: the last of them would be left out."""
    for entry in ("backward_sm90", "backward_sm90_wide"):
        assert kernel_of(entry).grid == ONE_TASK
    p = problem(batch=2**21, heads_q=2**10, heads_k=2**10, Nq=1, Nk=1)
    assert isinstance(kernel_of("backward_sm90").offer(p, HOPPER), Refusal)
    assert entries("backward", p, HOPPER)[1] == "backward_sm80"
    half = make_plan("backward", replace(p, batch=2**20), HOPPER)
    assert half.launches[1].entry == "backward_sm90" and half.launches[1].tasks <= MOST_BLOCKS


def test_a_kernel_of_another_architecture_is_one_more_record():
    """Without a word of it anywhere else: it is asked first, where its target is there."""
    class Sm100(Candidate):
        def best(self, problem, device):
            return kernel_of("forward_sm80").best(problem, device)

    own = Sm100("forward_sm100", "sm80/forward.cuh", "ForwardParams", target="100a",
                direction="forward", family="sm100")
    with tuned(kernels=(own, *KERNELS)):
        assert entries("forward", large(), replace(HOPPER, targets=("100a",))) == ["forward_sm100"]
        plan = make_plan("forward", large(), HOPPER)
    assert plan.launches[0].entry == "forward_sm90"
    assert [refusal.entry for refusal in plan.refusals] == ["forward_sm100"]
