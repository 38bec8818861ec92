"""``python -m cupy_flash doctor``: does the GPU path work here, and if not, what mends it?"""

from cupy_flash.backends.cuda import doctor
from cupy_flash.cli.progress import Progress

_MARKS = {doctor.OK: "ok      ", doctor.WARNING: "warning ", doctor.MISSING: "MISSING "}


def add_arguments(parser):
    """Add the options of the command: there are none."""


def run(_arguments) -> int:
    """Print what is found; return 0 if the GPU path works, else 1."""
    state = doctor.OK
    with Progress(len(doctor.CHECKS), "checking") as progress:
        for finding in doctor.examine():
            progress.print(_MARKS[finding.state] + finding.text)
            if finding.remedy is not None:
                progress.print(f"        to mend it: {finding.remedy}")
            state = finding.state
            progress.step()
    if state == doctor.MISSING:
        print("\nThe GPU path does not work here. NumPy arrays are computed on the CPU all the "
              "same.")
        return 1
    print("\nThe GPU path works.")
    return 0
