"""How the forces of an ``openmm.System`` are read and written, one file a kind."""
