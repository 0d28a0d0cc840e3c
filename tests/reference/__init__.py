"""Reference implementations of the equations: plain float64 loops in the papers' notation, for the tests."""
