"""Estimates before a run: the dry run and the formulas for memory, disk and time."""
