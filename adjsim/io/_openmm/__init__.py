"""Readers and writers of the forces of an ``openmm.System``, one file a kind."""
