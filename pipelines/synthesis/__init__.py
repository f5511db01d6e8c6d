"""Synthetic training rows from documents: a teacher answers prompts about passages, and checks reject ungrounded rows."""
