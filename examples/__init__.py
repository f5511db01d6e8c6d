"""Worked examples of tuneline."""
