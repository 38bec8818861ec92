"""See `bench/charts.py`."""

from bench import charts

charts.ratios("features")
