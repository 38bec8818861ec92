"""See `bench/charts.py`."""

import charts

charts.errors()
