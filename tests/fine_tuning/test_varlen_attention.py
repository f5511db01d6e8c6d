"""Attention of packed rows with torch's kernel for sequences of different lengths: on a CPU with a reference kernel.

Fast tier: tensors of 48 tokens. The cases with `cuda` run the real kernel, where a GPU exists.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import varlen

from components.fine_tuning import varlen_attention
from tests import varlen_kernel

LENGTHS, HEADS, KEY_HEADS, WIDTH = (7, 1, 24, 16), 4, 2, 16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Layer(torch.nn.Module):
    """The attributes of an attention layer that transformers' sdpa reads."""

    is_causal = True
    num_key_value_groups = HEADS // KEY_HEADS


@pytest.fixture(params=DEVICES)
def attend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the registered attention and the device on which it runs."""
    from transformers import AttentionInterface

    if request.param == "cpu":
        monkeypatch.setattr(varlen, "varlen_attn", varlen_kernel.varlen_attn)
    varlen_attention.register()
    registered = AttentionInterface()[varlen_attention.NAME]

    def call(*tensors: torch.Tensor, mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        out: torch.Tensor = registered(Layer(), *tensors, mask, dropout=0.0, **options)[0]
        return out

    call.device = request.param  # type: ignore[attr-defined]
    return call


def draw(device: str, tokens: int, keys: int | None = None, rows: int = 1, dtype: Any = torch.bfloat16) -> list[Any]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(rows, HEADS, tokens, WIDTH), *[(rows, KEY_HEADS, keys or tokens, WIDTH)] * 2]
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


def compute_exact(tensors: list[torch.Tensor], visible: torch.Tensor) -> torch.Tensor:
    """Return the attention in float64; `visible` has the shape (rows or 1, tokens, keys)."""
    query, key, value = (tensor.detach().double() for tensor in tensors)
    key, value = (part.repeat_interleave(HEADS // KEY_HEADS, 1) for part in (key, value))
    scores = (query @ key.transpose(-1, -2) / WIDTH**0.5).masked_fill(~visible[:, None].to(query.device), -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def see_own_row(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.block_diag(*(torch.ones(length, length).tril() for length in lengths)).bool()[None]


@pytest.mark.parametrize("has_ends", [True, False])
def test_packed_rows_attend_to_themselves_only(attend: Any, has_ends: bool) -> None:
    tensors = draw(attend.device, sum(LENGTHS))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None].to(attend.device)
    options: dict[str, Any] = {"position_ids": positions}
    if has_ends:
        ends = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32).to(attend.device)
        options |= {"cu_seq_lens_q": ends, "max_length_q": max(LENGTHS)}
    out = attend(*tensors, **options)
    exact = compute_exact(tensors, see_own_row(LENGTHS))
    torch.testing.assert_close(out.double(), exact, atol=0.03, rtol=0.03)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out)
    (out * weights).sum().backward()
    gradients = [tensor.grad for tensor in tensors]
    references = [tensor.detach().double().requires_grad_() for tensor in tensors]
    query, key, value = references
    key, value = (part.repeat_interleave(HEADS // KEY_HEADS, 1) for part in (key, value))
    mask = see_own_row(LENGTHS)[:, None].to(out.device)
    scores = (query @ key.transpose(-1, -2) / WIDTH**0.5).masked_fill(~mask, -torch.inf)
    ((scores.softmax(-1) @ value).transpose(1, 2) * weights.double()).sum().backward()
    for found, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(found.double(), reference.grad, atol=0.05, rtol=0.05)


def test_rows_of_equal_lengths_attend_to_themselves_only(attend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed by cuDNN on a GPU."""
    monkeypatch.setattr(varlen_attention, "MIN_EQUAL_LENGTH", 16)
    tensors = draw(attend.device, 48)
    ends = torch.tensor([0, 16, 32, 48], dtype=torch.int32, device=attend.device)
    out = attend(*tensors, cu_seq_lens_q=ends, max_length_q=16)
    torch.testing.assert_close(out.double(), compute_exact(tensors, see_own_row((16, 16, 16))), atol=0.03, rtol=0.03)
    out.sum().backward()
    assert all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in tensors)


def test_a_row_without_positions_is_causal(attend: Any) -> None:
    tensors = draw(attend.device, 20)
    torch.testing.assert_close(
        attend(*tensors).double(), compute_exact(tensors, see_own_row((20,))), atol=0.03, rtol=0.03
    )


def test_generation_attends_to_the_cache(attend: Any) -> None:
    tensors = draw(attend.device, 1, keys=9)
    out = attend(*tensors, position_ids=torch.tensor([[8]], device=attend.device))
    torch.testing.assert_close(
        out.double(), compute_exact(tensors, torch.ones(1, 1, 9, dtype=torch.bool)), atol=0.03, rtol=0.03
    )


def test_padding_and_a_window_limit_the_keys(attend: Any) -> None:
    tensors = draw(attend.device, 6, rows=2, dtype=torch.float32)
    padding = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]], device=attend.device)
    out = attend(*tensors, mask=padding)
    causal = see_own_row((6,))
    exact = compute_exact(tensors, causal & padding[:, None].bool().cpu())
    torch.testing.assert_close(out[padding.bool()].double(), exact[padding.bool()], atol=1e-5, rtol=1e-5)
    windowed = attend(*tensors, sliding_window=3)
    near = causal & torch.ones(6, 6, dtype=torch.bool).triu(-2)
    torch.testing.assert_close(windowed.double(), compute_exact(tensors, near), atol=1e-5, rtol=1e-5)
