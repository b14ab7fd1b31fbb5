"""`make docs` builds this folder into build/docs: offline, and a warning is an error."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import oomkit  # noqa: E402

project = "oomkit"
version = release = oomkit.__version__
author = "The oomkit developers"
html_show_copyright = False

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block", "colon_fence"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures stay readable; the types are in the stubs
default_role = "code"

html_theme = "furo"
html_title = f"oomkit {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
pygments_style = "tango"
pygments_dark_style = "github-dark"


def drop_signature(app, what, name, obj, options, lines):  # noqa: ARG001
    """Some docstrings repeat the signature, on several lines, up to the first blank one."""
    if lines and lines[0].startswith(name.rpartition(".")[2] + "("):
        del lines[: lines.index("") + 1]


def setup(app):
    app.connect("autodoc-process-docstring", drop_signature, priority=100)
