"""Files that are kept with a run besides its records."""
