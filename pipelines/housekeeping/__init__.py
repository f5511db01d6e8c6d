"""Keeping house: what nothing needs any more is found, shown, and removed when asked."""
