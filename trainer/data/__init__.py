"""Text as tokens, and batches of it as a pure function of their number."""
