"""Implicit steps of stiff systems, and their solution by Newton's method."""
