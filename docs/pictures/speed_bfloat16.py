"""See `bench/charts.py`."""

import charts

charts.lengths("16-bit", "bfloat16")
