"""Sweeps, sequences and searches: which trials run, and what becomes of them."""
