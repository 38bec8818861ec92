"""See `bench/charts.py`."""

from bench import charts

charts.lengths("science", "float64", masks=("full",))
