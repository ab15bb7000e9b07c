"""Fits of parameters to a measured curve."""
