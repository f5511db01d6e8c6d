"""Optimizers of a training run, with their memory and requirements.

To add an optimizer, add its name to `OptimizerName` and its entry to `OPTIMIZERS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OptimizerName = Literal["adamw", "adafactor", "adamw_8bit", "paged_adamw_8bit", "muon"]


@dataclass(frozen=True)
class Optimizer:
    """Properties of an optimizer.

    Attributes:
        summary: Description; shown in the configuration reference.
        transformers_name: Name in transformers' TrainingArguments. None: transformers' AdamW for the device.
        state_bytes: Bytes of the optimizer's state for each trained parameter.
        requires_bitsandbytes: Whether it runs on NVIDIA GPUs only, with bitsandbytes.
        trains_matrices: Whether it orthogonalizes the updates of whole matrices (`muon.build_muon`).
    """

    summary: str
    transformers_name: str | None
    state_bytes: float
    requires_bitsandbytes: bool = False
    trains_matrices: bool = False


OPTIMIZERS: dict[OptimizerName, Optimizer] = {
    "adamw": Optimizer("AdamW in float32, 8 bytes per trained parameter", None, 8.0),
    # Factored second moments: a row and a column for each matrix. No first moment.
    "adafactor": Optimizer(
        "factored second moments, with almost no optimizer memory (Shazeer and Stern, arXiv 1804.04235)",
        "adafactor",
        0.1,
    ),
    "adamw_8bit": Optimizer(
        "AdamW with 8-bit moments, 2 bytes per trained parameter (NVIDIA GPU; Dettmers et al., arXiv 2110.02861)",
        "adamw_bnb_8bit",
        2.0,
        requires_bitsandbytes=True,
    ),
    "paged_adamw_8bit": Optimizer(
        "adamw_8bit with moments that move to main memory if GPU memory is short (NVIDIA GPU; arXiv 2305.14314)",
        "paged_adamw_8bit",
        2.0,
        requires_bitsandbytes=True,
    ),
    # A momentum of 4 bytes, and 8 bytes for the weights that AdamW trains: together 4.5 for Llama 3 8B, 4.8 for
    # SmolLM2-135M. `muon.check_share` refuses models with more than 6.
    "muon": Optimizer(
        "orthogonalized updates for the matrices of hidden layers, AdamW for the other weights; adaptation full only "
        "(Jordan et al., 2024; Liu et al., arXiv 2502.16982)",
        None,
        5.0,
        trains_matrices=True,
    ),
}
