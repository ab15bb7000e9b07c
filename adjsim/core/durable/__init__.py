"""Files, stores and ranks: results that outlive the process that computes them."""
