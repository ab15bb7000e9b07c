"""Derivatives of long-time averages, and Lyapunov exponents, of chaotic flows."""
