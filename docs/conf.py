"""Settings of Sphinx: `make docs` runs the examples and writes the pages to docs/_build."""

import sys
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "extensions"), str(HERE), str(HERE.parent)]

import cupy_flash  # noqa: E402

project = "cupy_flash"
author = "The cupy_flash developers"
copyright = author
version = release = cupy_flash.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc", "sphinx_gallery.gen_gallery",
              "matplotlib.sphinxext.plot_directive", "computed", "mathml", "unbroken"]
exclude_patterns = ["_build", "gallery/sg_execution_times.rst", "sg_execution_times.rst"]
numpydoc_show_class_members = False
highlight_language = "none"             # blocks that name no language are no Python

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
html_math_renderer = "mathml"

plot_basedir = str(HERE / "pictures")
plot_formats = ["svg"]
plot_html_show_formats = plot_html_show_source_link = False

sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": ".",            # every example runs, whatever it is called
    "ignore_pattern": "mpi_ranks",      # what `mpiexec` starts in several processes
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_signature": False,
    "write_computation_times": False,
    "min_reported_time": 0,
    "remove_config_comments": True,
    "within_subsection_order": "FileNameSortKey",
}
# A figure of an example is caught by Sphinx-Gallery; there is no window that could show it.
warnings.filterwarnings("ignore", "FigureCanvasAgg is non-interactive")

html_theme = "pydata_sphinx_theme"
html_title = "cupy_flash"
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_sidebars = {name: [] for name in ("index", "start", "api")}
html_theme_options = {
    "navbar_end": ["theme-switcher"],
    "navbar_persistent": ["search-button-field"],
    "header_links_before_dropdown": 6,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "navigation_with_keys": False,
}
