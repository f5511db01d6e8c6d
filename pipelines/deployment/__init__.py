"""Deployment of registered versions: a Triton server that follows a registry alias."""
