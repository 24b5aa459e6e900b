"""What a run needs before it costs anything: memory, traffic, time, and the simplest layout that fits."""
