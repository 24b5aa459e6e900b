"""JSON Schemas of what commands print."""
