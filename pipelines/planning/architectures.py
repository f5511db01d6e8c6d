"""Shapes of models without their weights: public models by name, a config.json, or a number of parameters.

architectures.yaml has the public models. Parameters are counted from the shape, so that neither weights nor torch are
needed.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from components.common.models.model_shape import ModelShape
from components.common.runtime.errors import UsageError
from components.common.runtime.yaml_loading import load_yaml

UNITS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
MIN_PARAMETERS, MAX_PARAMETERS = 10**6, 10**13
MAX_SIZE = 10**7  # of a number in config.json
# Head size, layers per hidden size and MLP ratio of Llama 3 8B, the typical shape for a number of parameters.
TYPICAL_HEAD, TYPICAL_LAYER_RATIO, TYPICAL_MLP_RATIO, TYPICAL_VOCABULARY = 128, 128, 3.5, 128_256
ATTENTION_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR_NAMES = (*ATTENTION_NAMES, "gate_proj", "up_proj", "down_proj")
CONFIG_KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
OPTIONAL_CONFIG_KEYS = (
    "intermediate_size", "num_key_value_heads", "head_dim", "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
)  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """The shape of a decoder-only model; see architectures.yaml for the keys.

    Attributes:
        mlp: matrices of an MLP: 3 with a gate, else 2.
    """

    name: str
    source: str
    h: int
    i: int
    L: int
    a: int
    kv: int
    V: int
    d: int = 0
    tied: bool = False
    bias: bool = False
    qk_norm: bool = False
    norms: int = 2
    experts: int = 0
    used: int = 0
    expert_i: int = 0
    mlp: int = 3
    extra: int = 0
    """Other parameters, such as learned positions."""

    @property
    def head(self) -> int:
        """The size of an attention head."""
        return self.d or self.h // self.a

    @property
    def attention_matrices(self) -> dict[str, tuple[int, int]]:
        """Input and output size of the attention's matrices, by their names in transformers."""
        queries, keys = self.a * self.head, self.kv * self.head
        return {
            "q_proj": (self.h, queries),
            "k_proj": (self.h, keys),
            "v_proj": (self.h, keys),
            "o_proj": (queries, self.h),
        }

    @property
    def mlp_matrices(self) -> dict[str, tuple[int, int]]:
        """Input and output size of the matrices of one MLP, or of one expert."""
        inner = self.expert_i or self.i
        gate = {"gate_proj": (self.h, inner)} if self.mlp == 3 else {}
        return {**gate, "up_proj": (self.h, inner), "down_proj": (inner, self.h)}

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        layer = _count(self.attention_matrices) + max(self.experts, 1) * _count(self.mlp_matrices)
        layer += self.norms * self.h + self.experts * self.h + (2 * self.head if self.qk_norm else 0)
        layer += (self.a + 2 * self.kv) * self.head if self.bias else 0
        return self.L * layer + (1 if self.tied else 2) * self.V * self.h + self.h + self.extra

    def count_lora_parameters(self, rank: int, targets: Sequence[str] = LINEAR_NAMES) -> int:
        """Return r(d_in + d_out) of each adapted matrix (Hu et al., arXiv 2106.09685).

        Args:
            targets: names in LINEAR_NAMES. All experts are adapted.
        """
        sizes = [size for name, size in self.attention_matrices.items() if name in targets]
        sizes += [size for name, size in self.mlp_matrices.items() if name in targets] * max(self.experts, 1)
        return self.L * rank * sum(width + height for width, height in sizes)

    def build_shape(self, *, adapter: int | None) -> ModelShape:
        """Return the shape of a training run.

        Args:
            adapter: Number of parameters of the adapter. None: all weights are trained.
        """
        used_i = self.used * self.expert_i if self.experts else self.i
        return ModelShape(
            parameters=self.parameters + (adapter or 0),
            trainable=self.parameters if adapter is None else adapter,
            embedding=0 if self.tied else self.V * self.h,
            layers=self.L,
            hidden=self.h,
            intermediate=used_i,
            vocabulary=self.V,
            key_width=self.kv * self.head,
            query_width=self.a * self.head,
            inactive=self.L * max(self.experts - self.used, 0) * _count(self.mlp_matrices) if self.experts else 0,
        )


def _count(matrices: Mapping[str, tuple[int, int]]) -> int:
    return sum(width * height for width, height in matrices.values())


@cache
def load_architectures() -> dict[str, Architecture]:
    """Return the public models by name."""
    rows = load_yaml(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    assert isinstance(rows, dict)
    return {name: Architecture(name=name, **row) for name, row in rows.items()}


def find_architecture(model: str) -> Architecture:
    """Return the shape of a model.

    Args:
        model: Name of a public model, also with its organization; path of a config.json or its folder; or a number of
            parameters such as 8b.

    Raises:
        UsageError: the model is unknown, or its config.json is not that of a decoder-only model.
    """
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise UsageError(
                f"--model {model!r} is a folder without config.json", hint="Specify the folder of a model."
            )
    if path.is_file() or path.suffix == ".json":
        return read_config(path)
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmbt]?)", model.strip().lower()):
        return derive_architecture(round(float(match[1]) * UNITS.get(match[2], 1)), model)
    return find_public_architecture(model)


def find_public_architecture(model: str) -> Architecture:
    """Return a public model by name; case, organization and the suffix of its variant do not matter.

    Raises:
        UsageError: the model is unknown.
    """
    known = load_architectures()
    plain = re.sub(r"^meta-", "", model.rstrip("/").rsplit("/", 1)[-1].lower())
    plain = re.sub(r"-(hf|instruct|chat|it|pt|base|4k|v0\.\d)(?=-|$)", "", plain)
    if plain in known:
        return known[plain]
    nearest = difflib.get_close_matches(plain, known, n=3, cutoff=0.5)
    names = ", ".join(nearest or known)
    raise UsageError(
        f"--model {model!r} is not a known model, a config.json or a number of parameters",
        hint=f"Specify {'one of the nearest names: ' if nearest else 'one of '}{names}; the path of a config.json; "
        "or a number such as 8b.",
    )


def read_config(path: Path) -> Architecture:
    """Return the shape of a config.json in the format of transformers.

    Raises:
        UsageError: the file is not JSON, or lacks a size.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}", hint="Specify the config.json of a model."
        ) from None
    except (RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"{path} is not JSON: {error}", hint="Specify the config.json of a model.") from None
    config = config.get("text_config", config) if isinstance(config, Mapping) else {}
    config = config if isinstance(config, Mapping) else {}
    optional = [key for key in OPTIONAL_CONFIG_KEYS if config.get(key)]
    if missing := [key for key in (*CONFIG_KEYS, *optional) if not _is_size(config.get(key))]:
        raise UsageError(
            f"{path}: missing or invalid {', '.join(missing)}; expected a whole number from 1 to {MAX_SIZE:,}",
            hint="Specify the config.json of a decoder-only model in the format of transformers.",
        )
    return _convert_config(path, config)


def _is_size(value: object) -> bool:
    return type(value) is int and 1 <= value <= MAX_SIZE


def _convert_config(path: Path, config: Mapping[str, Any]) -> Architecture:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kind = str(config.get("model_type", ""))
    is_gemma, is_norm = kind.startswith("gemma"), kind.startswith(("qwen3", "gemma3"))
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    return Architecture(
        name=path.parent.name or str(path),
        source=str(path),
        h=hidden,
        i=config.get("intermediate_size") or 4 * hidden,
        L=config["num_hidden_layers"],
        a=heads,
        kv=config.get("num_key_value_heads") or heads,
        V=config["vocab_size"],
        d=config.get("head_dim") or 0,
        tied=bool(config.get("tie_word_embeddings", is_gemma)),
        bias=bool(config.get("attention_bias", kind == "qwen2")),
        qk_norm=is_norm,
        norms=4 if kind.startswith(("gemma2", "gemma3")) else 2,
        experts=experts,
        used=config.get("num_experts_per_tok") or 0,
        expert_i=(config.get("moe_intermediate_size") or config.get("intermediate_size") or 0) if experts else 0,
    )


def derive_architecture(parameters: int, model: str) -> Architecture:
    """Return a typical shape for a number of parameters, with the proportions of Llama 3 8B.

    Raises:
        UsageError: the number is out of range.
    """
    if not MIN_PARAMETERS <= parameters <= MAX_PARAMETERS:
        raise UsageError(
            f"--model {model!r} is not between {MIN_PARAMETERS:,} and {MAX_PARAMETERS:,} parameters",
            hint="Use a number such as 8b, or the name of a model.",
        )

    def build(heads: int) -> Architecture:
        hidden, layers = heads * TYPICAL_HEAD, max(2, heads * TYPICAL_HEAD // TYPICAL_LAYER_RATIO)
        shared = TYPICAL_VOCABULARY * hidden > parameters / 10  # small models share the embedding
        return Architecture(
            name=f"{model} parameters",
            source="a typical shape: the proportions of Llama 3 8B",
            h=hidden,
            i=int(hidden * TYPICAL_MLP_RATIO),
            L=layers,
            a=heads,
            kv=max(1, heads // 4),
            V=min(TYPICAL_VOCABULARY, max(1000, parameters // (4 * hidden))),
            tied=shared,
        )

    nearest = min((build(heads) for heads in range(1, 257)), key=lambda one: abs(one.parameters - parameters))
    # The number of layers takes up most of the rest, and `extra` what no shape of whole layers has.
    layer = (nearest.parameters - nearest.V * nearest.h * (1 if nearest.tied else 2)) // nearest.L
    layers = max(1, nearest.L + round((parameters - nearest.parameters) / layer))
    fields = {**nearest.__dict__, "L": layers}
    shaped = Architecture(**fields)
    return Architecture(**{**fields, "extra": parameters - shaped.parameters})
