"""See `bench/charts.py`."""

from bench import charts

charts.errors()
