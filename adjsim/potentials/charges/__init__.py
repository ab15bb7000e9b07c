"""Electrostatics of point charges."""
