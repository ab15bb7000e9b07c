"""Constant pressure: dynamics whose box is a field of the state."""
