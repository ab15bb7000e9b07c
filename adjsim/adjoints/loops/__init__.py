"""Steps in compiled loops, forward and backward."""
