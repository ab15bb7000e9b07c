"""Pair potentials, and the evaluation of their sums."""
