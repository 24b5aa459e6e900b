"""Files in a run's folder that are not records."""
