"""Triton packaging stage: write a model repository for a model, and verify it in a real Triton Inference Server.

`python_backend` and `vllm_backend` contain the code that runs inside Triton; `deployment` replaces versions in a
running server.
"""
