"""Files in a run's folder other than records."""
