"""The model that is trained."""
