"""Runge-Kutta and Heun steps that are reversed by algebra."""
