"""Dynamics of any vector field, without a potential."""
