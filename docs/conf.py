"""How Sphinx builds the site: `make docs`. See docs/adr/0012 for the choice of tools."""

from __future__ import annotations

import sys
from pathlib import Path

import cxl_offload

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "cxl_offload"
author = project_copyright = "The cxl_offload authors"
release = version = cxl_offload.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "offline"]
exclude_patterns = ["_extensions"]
highlight_language = "text"  # what a fence without a language holds

# Markdown: headings can be linked to, and a link to a file that is no page offers the file.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

# The reference: names by what they are for, types in the signature only.
napoleon_google_docstring = False
napoleon_use_rtype = False
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_mock_imports = ["deepspeed"]  # heavy, and not what is described
autodoc_default_options = {"members": True}
add_module_names = False

html_theme = "furo"
html_title = f"cxl_offload {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
