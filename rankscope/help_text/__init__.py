"""`--help` of the commands."""
