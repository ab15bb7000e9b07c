"""Explicit Runge-Kutta steps: their coefficients, and steps of fixed and varying size."""
