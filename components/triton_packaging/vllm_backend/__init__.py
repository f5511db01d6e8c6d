"""Triton backend `vllm`: starts vLLM with the models and adapters of a package. Its files do not import tuneline."""
