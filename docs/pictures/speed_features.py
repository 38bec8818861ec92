"""See `bench/charts.py`."""

import charts

charts.ratios("features")
