"""See `bench/charts.py`."""

import charts

charts.lengths("science", "float64", masks=("full",))
