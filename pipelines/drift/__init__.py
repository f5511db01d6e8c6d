"""Drift of captured prompts: features, tests of windows, the alarm, and its report."""
