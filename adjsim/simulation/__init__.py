"""The function simulate: checks of its arguments and of the start, and the manifest of a run."""
