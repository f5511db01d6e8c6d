"""Quality scores of the rows that all other steps keep."""
