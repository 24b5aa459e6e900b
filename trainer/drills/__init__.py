"""Injected faults, to test that they are named and survived."""
