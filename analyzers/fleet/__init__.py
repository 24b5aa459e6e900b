"""Many runs together: which hosts and devices have trouble more often than chance explains."""
