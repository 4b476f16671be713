"""Sphinx configuration; `make docs` builds with warnings as errors."""

import torch_pfc

project = "torch_pfc"
author = "the torch_pfc developers"
release = torch_pfc.__version__
html_theme = "furo"
html_title = f"torch_pfc {release}"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 2
exclude_patterns = ["_build"]
nitpicky = False
autodoc_typehints = "none"  # the docstrings give dtype and shape
autodoc_member_order = "bysource"
napoleon_google_docstring = True
