"""JSON Schemas of the commands' output."""
