"""Dynamics under holonomic constraints."""
