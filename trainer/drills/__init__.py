"""Faults made on purpose, to see that the suite names them and survives them."""
