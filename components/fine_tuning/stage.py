"""Fine-tuning: a dataset and a base model in, a tuned model out, resumable at any moment."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from components.common import artifacts, conversations, hashing, models
from components.common.artifacts import Artifact
from components.common.errors import InputError
from components.common.models import Base
from components.common.progress import Reporter
from components.fine_tuning import report, training
from components.fine_tuning.config import FineTuningConfig
from components.fine_tuning.data import Examples, read_examples
from components.fine_tuning.methods import ADAPTATIONS
from components.fine_tuning.training import Trained

STAGE = "fine_tuning"
# Everything but these in the output folder is payload.
EVIDENCE = ("report.html", "training.jsonl")
# Lists of adapter_config.json whose order means nothing. Others, such as a model's layer_types, are one entry a layer.
SETS = ("target_modules", "modules_to_save", "exclude_modules")


def finetune(
    dataset: Artifact,
    output: Path,
    config: FineTuningConfig,
    *,
    seed: int,
    state: Path,
    reporter: Reporter,
    dataset_uri: str = "",
    base: Base | None = None,
    overwrite: bool = False,
) -> Artifact:
    """Tune `config.base_model` on the dataset's training split and publish the model in `output`.

    Checkpoints go to `state`/fine_tuning/<key>, where the key is the digest of inputs, configuration and code; the same call after a
    kill goes on from the newest whole one and ends with the same weights. Raises InputError for rows the objective cannot learn from,
    TrainingError when the loss is lost, InterruptedRunError after a signal.
    """
    kind = conversations.kind_of(dataset)
    base = base or models.base_model(config.base_model, reporter)
    key = _key(dataset, base, config, seed)
    work = state / STAGE / key
    finished = artifacts.begin(output, key, overwrite=overwrite)
    if finished:
        shutil.rmtree(work, ignore_errors=True)  # killed after publishing
        return finished
    work.mkdir(parents=True, exist_ok=True)
    tokenizer, examples, validation = _examples(dataset, kind, base, config, reporter)
    trained = _train(base, tokenizer, examples, validation, config, seed, work, reporter)
    reporter.step("writing the model")
    _write_model(trained.model, tokenizer, base, output)
    shutil.copyfile(work / training.LOG, output / "training.jsonl")
    summary = _summary(trained, examples, kind)
    inputs = [dataset.as_input(dataset_uri), base.as_input()]
    (output / "report.html").write_text(report.page(trained, summary, inputs, config), encoding="utf-8")
    published = artifacts.publish(
        output,
        "model",
        payload=lambda path: path not in EVIDENCE,
        inputs=inputs,
        config=config.model_dump(),
        seed=seed,
        key=key,
        summary=summary,
    )
    shutil.rmtree(work, ignore_errors=True)  # another job with the same key may have been first
    return published


def _key(dataset: Artifact, base: Base, config: FineTuningConfig, seed: int) -> str:
    """Digest of everything the weights depend on, device and threads among it: sums in another order differ in their last bits."""
    return hashing.digest(
        {
            "stage": STAGE,
            "code": hashing.code_sha256(STAGE),
            "inputs": [dataset.sha256, base.sha256],
            "config": config.model_dump(),
            "seed": seed,
            "arithmetic": models.arithmetic(),
        }
    )


def _examples(dataset: Artifact, kind: str, base: Base, config: FineTuningConfig, reporter: Reporter) -> tuple[Any, Examples, Examples]:
    tokenizer = models.load_tokenizer(base.path)
    reporter.step("reading the training rows")
    if kind != "sft":
        reporter.note(f"objective {config.objective} learns {conversations.used(kind)}")
    options: dict[str, Any] = {"max_length": config.max_length, "kind": kind, "reporter": reporter}
    examples = read_examples(dataset.path / "train.parquet", tokenizer, **options)
    if not examples.rows:
        raise InputError(
            f"no training row has an answer within {config.max_length} tokens",
            hint="Raise fine_tuning.max_length, or look at the dataset's report.",
        )
    if examples.truncated:
        reporter.note(f"{examples.truncated} training rows are longer than {config.max_length} tokens and were cut")
    reporter.step("reading the validation rows")
    validation = read_examples(dataset.path / "validation.parquet", tokenizer, **options, limit=config.validation_rows)
    return tokenizer, examples, validation


def _train(
    base: Base,
    tokenizer: Any,
    examples: Examples,
    validation: Examples,
    config: FineTuningConfig,
    seed: int,
    work: Path,
    reporter: Reporter,
) -> Trained:
    training.quiet_hub()
    reporter.step("loading the base model")
    import torch

    models.prepare_torch(seed)
    # Frozen weights may be bf16 on a GPU; weights that are trained are float32 under bf16 autocast, or small updates round away.
    dtype = torch.float32 if config.adaptation == "full" else None
    model = models.load(models.Model(base.sha256, base, base.path, None, None), trainable=True, dtype=dtype)
    model = ADAPTATIONS[config.adaptation](model, config)
    reporter.step("training")
    return training.train(model, tokenizer, examples, validation, config, seed=seed, state=work, reporter=reporter)


def _write_model(model: Any, tokenizer: Any, base: Base, output: Path) -> None:
    """Weights and tokenizer as safetensors and JSON, with nothing in them that differs from machine to machine."""
    model.save_pretrained(output, safe_serialization=True)
    tokenizer.save_pretrained(output)
    (output / "README.md").unlink(missing_ok=True)  # PEFT's empty model card
    for path in output.glob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes 0600, and whoever serves it may be another user
    for name in (models.ADAPTER_CONFIG, "config.json"):
        _write_canonically(output / name, base)


def _write_canonically(path: Path, base: Base) -> None:
    """Sort what PEFT writes in a set's order, and name the base by its source instead of by its folder here."""
    if not path.exists():
        return
    values = json.loads(path.read_text(encoding="utf-8"))
    for name in SETS:
        if isinstance(values.get(name), list):
            values[name] = sorted(values[name])
    for name in ("base_model_name_or_path", "_name_or_path"):
        if name in values:
            values[name] = _public_name(base.uri)
    path.write_text(json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _public_name(uri: str) -> str:
    """A base model's name without the place it lies in, which would make equal weights differ from machine to machine."""
    if uri.startswith("hf://"):
        return uri.removeprefix("hf://").partition("@")[0]
    return uri if uri.startswith("embedded:") else Path(uri).name


def _summary(trained: Trained, examples: Examples, kind: str) -> dict[str, Any]:
    trainable = sum(p.numel() for p in trained.model.parameters() if p.requires_grad)
    return {
        "steps": trained.steps,
        "tokens": trained.tokens,
        "train_loss": trained.train_loss,
        "validation_loss": trained.validation_loss,
        "tokens_per_second": round(trained.tokens_per_second, 2),
        "resumed_from": trained.resumed_from,
        "rows": {"train": len(examples.rows), "truncated": examples.truncated, "without_answer": examples.without_answer},
        "learned": conversations.used(kind),
        "arithmetic": models.arithmetic(),
        "parameters": {"trainable": trainable, "all": sum(p.numel() for p in trained.model.parameters())},
    }
