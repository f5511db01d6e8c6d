"""The OpenAI-compatible HTTP server in front of Triton."""
