"""``python -m adjsim``: the same as the ``adjsim`` command."""

from adjsim.cli.app import app

app(prog_name="adjsim")
