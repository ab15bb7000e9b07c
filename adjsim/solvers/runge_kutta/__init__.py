"""Explicit Runge-Kutta steps of fixed and of varying size."""
