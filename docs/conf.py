"""Sphinx configuration."""

from tritoncomm import __version__

project = "tritoncomm"
author = "The tritoncomm developers"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 3
autodoc_mock_imports = ["accelerate", "lightning", "transformers"]  # optional, and slow to import
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
html_theme = "alabaster"
html_theme_options = {"description": "Sparse gradient exchange for PyTorch", "fixed_sidebar": True}
exclude_patterns = ["_build"]
nitpicky = False
