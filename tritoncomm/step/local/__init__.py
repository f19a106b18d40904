"""Workers that step alone between two exchanges."""
