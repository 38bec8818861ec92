"""Backends: each runs a plan on arrays of its own kind, with one `run`."""
