"""The papers' tables and figures: which runs make each one, and what the paper claims of it."""
