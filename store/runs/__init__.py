"""A run as a whole: files in its folder that are not records, and its stores as one process reads them again."""
