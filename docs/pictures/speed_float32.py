"""See `bench/charts.py`."""

from bench import charts

charts.lengths("science", "tf32x3", masks=("full",))
charts.lengths("science", "tf32", masks=("full",))
