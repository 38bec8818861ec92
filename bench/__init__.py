"""Measurements: `python -m bench` from the root of a checkout; see `bench/README.md`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
sys.path.append(str(ROOT / "tests"))        # cases and rules of exactness are those of the tests
