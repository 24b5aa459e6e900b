"""Plan of a run before it starts: memory, traffic, time, and the simplest layout that fits."""
