"""Steps of stochastic differential equations without an inverse."""
