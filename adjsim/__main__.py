"""``python -m adjsim``: the same as the ``adjsim`` command."""

from adjsim_command import main

main()
