"""Triton Python backend that generates answers. Packages contain a copy of its files, which do not import tuneline."""
