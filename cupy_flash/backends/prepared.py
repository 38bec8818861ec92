"""Calls that have been made before: what all with one plan share is made from the first."""

from ..plan import make_plan

_MOST = 4096


class Prepared(dict):
    """What was prepared for plans, each under all that the plan follows from.

    The keys are (direction, problem, device, settings), the last as they are now; what is not there
    is made by `make`, from a `Plan` to an object with ``run(arrays)``.
    """

    def __init__(self, make):
        super().__init__()
        self._make = make

    def __missing__(self, key):
        if len(self) >= _MOST:
            self.clear()
        calls = self[key] = self._make(make_plan(*key[:3]))
        return calls
