"""Minima of the energy, their derivatives and their Hessians."""
