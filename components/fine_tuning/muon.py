"""Muon for the matrices of hidden layers, and AdamW for all other weights, as one optimizer."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from components.common.runtime.errors import ConfigurationError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

MIN_SHARE = 0.5  # with less, the training is one with AdamW, and so is its memory


def list_matrices(model: torch.nn.Module) -> list[str]:
    """Return the names of the weights that Muon trains: those of linear layers, except output head, routers and gates.

    Other weights of two dimensions are no linear maps: embeddings of tokens or positions, decays of state spaces, biases
    of experts.
    """
    from torch.nn import Linear
    from transformers.pytorch_utils import Conv1D

    embeddings = {id(layer.weight) for layer in (model.get_input_embeddings(), model.get_output_embeddings()) if layer}
    names = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, (Linear, Conv1D))
        and not type(module).__name__.endswith("Router")
        and not name.endswith(("gate", "router"))
    }
    return [
        name
        for name, parameter in model.named_parameters()
        if name in names and parameter.requires_grad and id(parameter) not in embeddings
    ]


def measure_share(model: torch.nn.Module) -> float:
    """Return the share of the model's weights that Muon trains."""
    sizes: dict[str, int] = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return sum(sizes[name] for name in list_matrices(model)) / sum(sizes.values())


def check_share(model: torch.nn.Module) -> None:
    """Check that Muon trains most of the model.

    Raises:
        ConfigurationError: AdamW would train most of it, as with fused experts or a small model's embeddings.
    """
    share = measure_share(model)
    if share < MIN_SHARE:
        raise ConfigurationError(
            f"fine_tuning.optimizer: muon trains {share:.0%} of this model's weights (its linear layers only); "
            f"expected at least {MIN_SHARE:.0%}",
            hint="Set fine_tuning.optimizer to adamw.",
        )


def build_muon(
    model: PreTrainedModel,
    decayed: Collection[str],
    weight_decay: float,
    adamw: type[torch.optim.Optimizer],
    adamw_options: dict[str, Any],
) -> torch.optim.Optimizer:
    """Return torch's Muon (Jordan et al., 2024) for the matrices and AdamW for the other weights.

    Args:
        model: The model that is trained with all weights.
        decayed: Names of the weights that decay.
        weight_decay: Decoupled weight decay of both.
        adamw: Class of AdamW.
        adamw_options: Its keyword arguments, with the learning rate of both as `lr`.
    """
    import torch

    class MuonWithAdamW(torch.optim.Optimizer):  # type: ignore[misc] # torch is untyped here
        """Both optimizers. Their groups are also the groups of this one, so that a schedule changes their rates."""

        def __init__(self) -> None:
            matrices = set(list_matrices(model))
            named = {name: value for name, value in model.named_parameters() if value.requires_grad}
            # This scale of an update has the size of AdamW's, whose learning rates apply (Liu et al., arXiv 2502.16982).
            muon = torch.optim.Muon(
                [named[name] for name in named if name in matrices],
                lr=adamw_options["lr"],
                weight_decay=weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
            others = [name for name in named if name not in matrices]
            groups = [
                {"params": [named[name] for name in others if name in decayed], "weight_decay": weight_decay},
                {"params": [named[name] for name in others if name not in decayed], "weight_decay": 0.0},
            ]
            self.parts = (muon, adamw([group for group in groups if group["params"]], **adamw_options))
            super().__init__([group for part in self.parts for group in part.param_groups], {})

        def step(self, closure: None = None) -> None:
            for part in self.parts:
                part.step()

        def state_dict(self) -> dict[str, Any]:
            return {"parts": [part.state_dict() for part in self.parts]}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            for part, state in zip(self.parts, state_dict["parts"], strict=True):
                part.load_state_dict(state)
            self.param_groups = [group for part in self.parts for group in part.param_groups]  # loading replaces them

    return MuonWithAdamW()
