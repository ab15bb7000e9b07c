"""``python -m adjsim``: the same as the ``adjsim`` command."""

from adjsim.cli import app

app(prog_name="adjsim")
