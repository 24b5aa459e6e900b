"""A run as a whole: the user's notes on it, and its stores for a process that reads them repeatedly."""
