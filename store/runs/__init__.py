"""What is kept with runs besides their records."""
