"""Runs that go on after an interruption, or from the end of another run."""
