"""Buckets of lengths in tokens, by which rules over slices group the evaluated items."""

from __future__ import annotations

# Upper bounds of the buckets. The bounds are fixed, so that all evaluations have the same slices.
LENGTH_BUCKET_ENDS = (64, 128, 256, 512, 1024, 2048, 4096)


def get_length_bucket(tokens: int) -> str:
    """Return the name of the length bucket for this number of tokens; "" for 0 tokens."""
    lower = 0
    for upper in LENGTH_BUCKET_ENDS:
        if 0 < tokens <= upper:
            return f"{lower + 1} to {upper} tokens"
        lower = upper
    return f"over {lower} tokens" if tokens else ""
