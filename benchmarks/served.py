"""Models, prompts and packages of the serving benchmark and the soak: answers without end, and prompts of known lengths."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

from benchmarks import corpus
from components.common.artifacts import artifact_folder
from components.common.models import model_loading
from components.common.runtime.reporters import SilentReporter
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.stage import package

NAME = "tuneline"
# With the embedded model's vocabulary of 49,152 tokens these are 27 million parameters. Heads of 64 are what vLLM takes on a processor.
SHAPE = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
RANDOM = "random:27m"


def model(source: str, folder: Path, *, endless: bool = True) -> Path:
    """Return the model of a source, or a random one for RANDOM, in `folder`.

    An endless model has no end token: every answer has the requested number of tokens, and JSON schemas are not supported.
    """
    if not (folder / "config.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        if source == RANDOM:
            _write_random(folder)
        else:
            shutil.copytree(model_loading.resolve_base_model(source).path, folder)
        for name in ("generation_config.json", "config.json") if endless else ():
            _without_end(folder / name)
    return folder


def _write_random(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = model_loading.load_tokenizer(model_loading.resolve_base_model(model_loading.EMBEDDED_SOURCE).path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SHAPE))
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _without_end(path: Path) -> None:
    if path.exists():
        artifact_folder.write_atomically(
            path, json.dumps({**json.loads(path.read_text(encoding="utf-8")), "eos_token_id": None}, indent=1)
        )


def parameters(folder: Path) -> int:
    """Return the number of a model's parameters."""
    from safetensors import safe_open

    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118 - no mapping
        for shape in shapes:
            size = 1
            for side in shape:
                size *= side
            total += size
    return total


def prompts(folder: Path, lengths: Sequence[int], count: int, seed: int = 0) -> list[str]:
    """Return texts of these lengths in turn, in tokens of the model in `folder`: sentences of this Python's documentation.

    A text that is cut within a word may have one token more or less.
    """
    draw, tokenizer = random.Random(seed), model_loading.load_tokenizer(folder)  # noqa: S311 - no secret
    pool = corpus.sentences()
    texts = []
    for number in range(count):
        wanted, ids = lengths[number % len(lengths)], list[int]()
        while len(ids) < wanted:
            ids += tokenizer(" ".join(draw.choice(pool)) + " ", add_special_tokens=False)["input_ids"]
        texts.append(str(tokenizer.decode(ids[:wanted])).strip())
    return texts


def packaged(folder: Path, output: Path, slots: int) -> Path:
    """Return the package of the model in `folder` with this number of slots, as `tuneline package` builds it. An existing package is reused."""
    config = TritonPackagingConfig(model_name=NAME, slots=slots, dtype="float32", prove=False)
    return package(model_loading.open_model(folder), output, config, seed=0, reporter=SilentReporter()).path
