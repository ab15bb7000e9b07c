"""Learnt energies and forces: networks of pairs and of graphs, and adapters of models."""
