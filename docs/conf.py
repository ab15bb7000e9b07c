"""Sphinx configuration."""

import os
import re
import sys
from importlib.metadata import version as installed
from pathlib import Path

import matplotlib
from sphinx.ext.autosummary import autosummary_toc
from sphinx_gallery.py_source_parser import split_code_and_text_blocks
from sphinx_gallery.sorting import ExplicitOrder

matplotlib.use("Agg")
# Examples run in two processes, which would otherwise have a team of threads each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The pages' processes find drawing.py.
sys.path.append(str(Path(__file__).parent))

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
exclude_patterns = ["_build", "_templates"]

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

# The sections of the gallery, and the examples of each, the simplest first. New ones come last.
GALLERY = {
    "first_steps": "fit_sigma throw cookbook_runs cookbook_fits adjoint_against_bptt "
    "exact_reversal potentials_and_integrators",
    "molecules": "learn_angle learnt_force fit_fluid argon network_from_structure water "
    "dipeptide peptide_distances disordered_protein gb99dms",
    "statistics": "barrier_crossing estimators fit_memory exploding_gradients "
    "energy_based_model beyond_equilibrium",
    "mechanics": "least_effort soft_cube two_balls cart_pole crawler identify_material "
    "inverse_design",
    "equations": "ivp_pouring ivp_throwing ivp_bounce ivp_identification ivp_van_der_pol "
    "latent_force neural_ode neural_cde neural_sde stochastic_volatility multilevel lorenz",
}
sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": r"/plot_",
    "ignore_pattern": r"/data/|__init__\.py",
    "subsection_order": ExplicitOrder([*(f"../examples/{name}" for name in GALLERY), "*"]),
    "within_subsection_order": ExplicitOrder(
        [*(f"plot_{name}.py" for names in GALLERY.values() for name in names.split()), "*"]
    ),
    "abort_on_example_error": True,
    "show_memory": False,
    "reset_modules": ("matplotlib", "seaborn", "drawing.draw_frames_once"),
    # The page of computation times would load a script from the internet.
    "write_computation_times": False,
    "parallel": 2,
    "remove_config_comments": True,
    "plot_gallery": True,
    "matplotlib_animations": True,
    "download_all_examples": False,
}


def show_picture_first(app, docname, source):
    """Show the figure that stands on the tile of an example also before the code of its page."""
    folder, _, name = docname.rpartition("/")
    if name.startswith("plot_"):
        settings, *_ = split_code_and_text_blocks(f"{app.srcdir}/{docname}.py")
        figure = f"/{folder}/images/sphx_glr_{name}_{settings.get('thumbnail_number', 1):03}.*"
        code = "\n.. GENERATED FROM PYTHON SOURCE LINES"
        picture = f"\n.. image:: {figure}\n   :alt: a figure that this page computes\n{code}"
        source[0] = source[0].replace(code, picture, 1)


def setup(app):
    """Write aliased types by their bare names, and leave public names out of the sidebar."""
    app.connect("source-read", show_picture_first)
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
