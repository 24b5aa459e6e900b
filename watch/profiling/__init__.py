"""Requests of `watch` to profile a suspect and a peer, and reading of the resulting traces."""
