"""The equations again, as plain float64 loops in the papers' letters: slow, readable, and the oracle of the tests."""
