"""Bonded terms of molecules, over lists of atoms."""
