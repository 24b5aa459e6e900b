"""Trials: tests with a success rate in place of a truth value. `make trials` repeats them, `make test` skips them."""
