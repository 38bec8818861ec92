"""Measurements: `python -m bench` from the root of a checkout; see `bench/README.md`."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
