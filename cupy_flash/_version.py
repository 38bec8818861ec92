"""The version of the package, read by `setup.cfg` without importing anything."""

__version__ = "0.1.0"
