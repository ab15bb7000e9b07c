"""Traced tensor programs as C++: one function without allocations for a whole loop of steps."""
