"""Sphinx configuration."""

from pathlib import Path

import tritoncomm

project = "tritoncomm"
author = "The tritoncomm developers"
release = version = tritoncomm.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 3
# Trainers are optional, and slow to import.
autodoc_mock_imports = [file.stem for file in Path(tritoncomm.__file__).parent.glob("integrations/[a-z]*.py")]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
html_theme = "alabaster"
html_theme_options = {"description": "Sparse gradient exchange for PyTorch", "fixed_sidebar": True}
exclude_patterns = ["_build"]
nitpicky = False
