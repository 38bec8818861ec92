"""Settings of Sphinx: `make docs` writes the pages to docs/_build."""

import cupy_flash

project = "cupy_flash"
author = "The cupy_flash developers"
copyright = author
version = release = cupy_flash.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc"]
exclude_patterns = ["_build"]
html_theme = "pydata_sphinx_theme"
html_show_sourcelink = False
numpydoc_show_class_members = False
