"""Solvers of torchdiffeq and torchsde."""
