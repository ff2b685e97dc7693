"""The documentation site: `make docs`, or `python -m sphinx -W --keep-going -n docs docs/_build/html`."""

import os
import sys
from importlib.metadata import version as installed
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS / "_ext"), str(DOCS.parent / "src")]

os.environ.setdefault("KERAS_BACKEND", "torch")  # bbalpha.integrations.keras is imported, and Keras asks for TensorFlow

project = "bbalpha"
author = "the authors of bbalpha"
project_copyright = "%Y, the authors of bbalpha"
release = version = installed("bbalpha")

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "myst_parser",
    "sphinx_copybutton",
    "mathml",  # formulas without a script: these four are in docs/_ext
    "notebooks",  # .ipynb files as pages
    "reference",  # pages of the API and the commands
    "names",  # `bbalpha.sample` in a text leads to its page
]
exclude_patterns = ["_build", "_ext", "**.ipynb_checkpoints"]
nitpicky = True
# names of other packages and of our private ones; what a docstring sets in quotes and is no name (an argument, a value)
nitpick_ignore_regex = [
    ("py:obj", ".*"),
    ("py:(class|data|exc|meth|func)", r"(?!bbalpha\.).*|bbalpha\._.*|bbalpha\.convert\.Model"),
    ("py:class", r"bbalpha\.(training\.(retrofitting|heldout)|integrations\.transformers\.heads)\..*"),
    ("py:class", r"bbalpha\.exploration\.surrogate\..*"),
]
default_role = "py:obj"

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
myst_dmath_double_inline = True

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 100

html_theme = "furo"
html_title = "bbalpha"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_last_updated_fmt = None
pygments_style, pygments_dark_style = "friendly", "monokai"
copybutton_exclude = ".linenos, .gp, .go"  # prompts and answers are not copied
