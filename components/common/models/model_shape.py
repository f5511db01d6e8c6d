"""The dimensions of a model that determine its memory and FLOPs; the formulas are in `resource_formulas`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of a model that determine memory and FLOPs.

    Attributes:
        parameters: number of parameters of the base model and the adapter.
        trainable: number of parameters with gradients.
        embedding: number of parameters of the input embedding.
        layers: number of layers.
        hidden: size of the hidden states (h in the formulas below).
        intermediate: inner size of the MLP (i).
        vocabulary: number of tokens in the vocabulary (V).
        key_width: size of a token's keys in one layer (k); that of its values is equal. 0: the size of the hidden states.
        query_width: size of a token's queries in one layer (q). 0: the size of the hidden states.
        inactive: number of parameters of the experts that a token does not use.
    """

    parameters: int
    trainable: int
    embedding: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    key_width: int = 0
    query_width: int = 0
    inactive: int = 0

    @property
    def frozen(self) -> int:
        """The number of parameters without gradients."""
        return self.parameters - self.trainable

    @staticmethod
    def from_configuration(config: Any, counted: dict[str, int]) -> ModelShape:
        """Return the shape of a transformers configuration with these parameter counts.

        Args:
            config: transformers.PretrainedConfig.
            counted: numbers of parameters, {"all", "trainable", "embedding"}.
        """
        text = config.get_text_config()
        hidden = int(text.hidden_size)
        heads = getattr(text, "num_attention_heads", None)
        key_heads = getattr(text, "num_key_value_heads", None) or heads
        head_width = getattr(text, "head_dim", None) or (hidden // heads if heads else 0)
        return ModelShape(
            parameters=counted["all"],
            trainable=counted["trainable"],
            embedding=counted["embedding"],
            layers=int(text.num_hidden_layers),
            hidden=hidden,
            intermediate=int(getattr(text, "intermediate_size", None) or 4 * hidden),
            vocabulary=int(text.vocab_size),
            key_width=int((key_heads or 0) * head_width),
            query_width=int((heads or 0) * head_width),
        )
