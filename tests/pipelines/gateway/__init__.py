"""Tests of the OpenAI-compatible gateway."""
