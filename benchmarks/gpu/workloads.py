"""Models with random weights, and datasets of real text, of the GPU benchmark. Nothing is downloaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.run_tuneline_finetune import dataset as publish_dataset
from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.models.model_loading import LocalBaseModel

TOKENIZER_ENTRIES = 16_000  # of the tokenizer that is trained on the rows
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Shapes of Llama 3 8B, Llama 3.2 1B, and of a model for a processor.
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": False},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": True},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 32_000, "tie_word_embeddings": False},
}  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """Questions and answers of the Python documentation: as they are, and answers joined to rows of full length."""

    short: list[dict[str, Any]]

    def join(self, characters: int, count: int) -> list[dict[str, Any]]:
        """Return `count` rows whose answers have at least this many characters of consecutive answers."""
        joined: list[dict[str, Any]] = []
        text: list[str] = []
        size, place = 0, 0
        while len(joined) < count:
            answer = self.short[place % len(self.short)]["messages"][-1]["content"]
            place += 1
            text.append(answer)
            size += len(answer) + 2
            if size >= characters:
                messages = [
                    {"role": "user", "content": "Quote the documentation."},
                    {"role": "assistant", "content": "\n\n".join(text)},
                ]
                joined.append({"id": f"joined-{len(joined)}", "messages": messages})
                text, size = [], 0
        return joined


def read_rows(folder: Path) -> Rows:
    """Return the demo's rows, each once, built from this machine's Python on first use."""
    from benchmarks import tuning_rows
    from components.data_curation import python_docs

    path = folder / "python_docs.jsonl"
    if not path.exists():
        python_docs.build(path)
    return Rows(tuning_rows.read(path))


def build_model(folder: Path, shape: str) -> LocalBaseModel:
    """Write a Llama of this shape with random bfloat16 weights and a tokenizer of the rows; return it if it exists."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    target = folder / f"model-{shape}"
    if not (target / "complete").exists():
        tokenizer = _train_tokenizer(read_rows(folder))
        config = LlamaConfig(
            **SHAPES[shape],
            max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(0)
        with torch.device(device):
            model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        (target / "complete").touch()
    return LocalBaseModel(target, "0" * 64, f"random weights of the shape {shape}")


def _train_tokenizer(rows: Rows) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_ENTRIES,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((message["content"] for row in rows.short for message in row["messages"]), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=special[1], eos_token=special[2], pad_token=special[0], unk_token=special[0],
        chat_template=CHATML, model_max_length=8192,
    )  # fmt: skip


def build_dataset(folder: Path, kind: str, length: int, count: int) -> Artifact:
    """Return a dataset artifact of `count` rows: "short" as they are, "long" of at least `length` tokens, or "pairs"."""
    target = folder / f"dataset-{kind}-{length}-{count}"
    if (target / "manifest.json").exists():
        return artifact_folder.read(target)
    rows = read_rows(folder)
    if kind == "pairs":
        return _publish_pairs(rows, target, count)
    # English text has at most about 5 characters a token; a row of 6 characters a token is truncated at the length.
    chosen = rows.join(6 * length, count) if kind == "long" else (rows.short * (1 + count // len(rows.short)))[:count]
    numbered = [{**row, "id": f"{place}-{row['id']}"} for place, row in enumerate(chosen)]
    return publish_dataset(numbered, target)


def _publish_pairs(rows: Rows, target: Path, count: int) -> Artifact:
    """Publish preference rows: the row's answer against that of the next row."""
    import pyarrow as pa
    from pyarrow import parquet

    from components.common.artifacts.artifact_folder import ArtifactInput

    message = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    text = [(name, pa.string()) for name in ("id", "source", "meta")]
    schema = pa.schema([("prompt", message), ("chosen", message), ("rejected", message), *text])
    pairs = [
        {"id": f"{place}", "prompt": row["messages"][:-1], "chosen": row["messages"][-1:],
         "rejected": other["messages"][-1:], "source": "benchmark", "meta": "{}"}
        for place, (row, other) in enumerate(zip(rows.short[:count], rows.short[1:], strict=False))
    ]  # fmt: skip
    artifact_folder.claim_folder(target, "benchmark")
    for split, some in (("train", pairs), ("validation", []), ("test", [])):
        parquet.write_table(pa.Table.from_pylist(some, schema), target / f"{split}.parquet", compression="zstd")
    return artifact_folder.publish(
        target, "dataset", payload=[f"{split}.parquet" for split in ("train", "validation", "test")],
        inputs=[ArtifactInput(kind="file", content_sha256="0" * 64, uri="benchmark")], config={}, seed=0, key="benchmark",
        summary={"rows_kind": "preference", "splits": {"train": len(pairs), "validation": 0, "test": 0}},
    )  # fmt: skip


def write_json(path: Path, value: Any) -> None:
    """Write a result of a stage."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
