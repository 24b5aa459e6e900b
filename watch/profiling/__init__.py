"""Requests of `watch` to profile a suspect rank and a peer, and the reader of the resulting traces."""
