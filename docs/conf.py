"""Sphinx configuration."""

import os
import re
from importlib.metadata import version as installed

import matplotlib
from sphinx.ext.autosummary import autosummary_toc

matplotlib.use("Agg")
# Examples run in two processes, which would otherwise have a team of threads each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

project = "adjsim"
author = "the adjsim authors"
copyright = "the adjsim authors"
release = installed("adjsim")
version = release

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    # Copies MathJax into the pages, so that formulas render without internet.
    "sphinx-mathjax-offline",
    "sphinx.ext.viewcode",
    "sphinx_gallery.gen_gallery",
]
templates_path = ["_templates"]
exclude_patterns = [
    "_build",
    "_templates",
    "gallery/*.py",
    "gallery/*.ipynb",
    "gallery/**/GALLERY_HEADER.rst",
]

html_theme = "furo"
html_title = f"adjsim {release}"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]

# Docstrings are Google style; members keep the order of the source. Types stand in the signature,
# under their short names.
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
# A member without words of its own is left out, not shown with torch's.
autodoc_inherit_docstrings = False
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_type_aliases = {
    name: name for name in ("Positions", "Energies", "Number", "Times", "Record", "Observable")
}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90

sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": r"/plot_",
    "ignore_pattern": r"/data/|__init__\.py",
    "nested_sections": False,
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "show_memory": False,
    # The page of computation times would load a script from the internet.
    "write_computation_times": False,
    "parallel": 2,
    "remove_config_comments": True,
    "plot_gallery": True,
    "matplotlib_animations": True,
    "download_all_examples": False,
}


def setup(app):
    """Write aliased types by their bare names, and leave public names out of the sidebar."""
    # This extension only adds files to pages, but does not declare that parallel reading is safe.
    app.extensions["sphinx-mathjax-offline"].parallel_read_safe = True

    def bare(app, what, name, obj, options, signature, returns):
        clean = [
            text and re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", text)
            for text in (signature, returns)
        ]
        return clean[0], clean[1]

    def unlisted(app, doctree):
        for node in list(doctree.findall(autosummary_toc)):
            node.parent.remove(node)

    app.connect("autodoc-process-signature", bare)
    # The sidebar of each page would list every public name, which takes half of the time of a
    # build. The page of the API lists them.
    app.connect("doctree-read", unlisted, priority=400)
