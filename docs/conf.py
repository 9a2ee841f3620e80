"""How Sphinx builds these pages: `make docs`."""

from __future__ import annotations

from importlib.metadata import version as _version

project = "torch-offload"
release = version = _version("torch-offload")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
html_theme = "furo"
html_title = project
exclude_patterns = ["_build"]
