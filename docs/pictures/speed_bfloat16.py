"""See `bench/charts.py`."""

from bench import charts

charts.lengths("16-bit", "bfloat16")
