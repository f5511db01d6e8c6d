"""Small artifacts with consistent evidence: a dataset, an evaluation with scores, and a package with a proof."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact, ArtifactInput, Manifest

WORDS = [letter * 2 + "amble" for letter in "bcdfghjklmnpqrstvwz"]
RULE = {
    "metric": "held_out.loss",
    "against": "base",
    "min_gain": 0.0,
    "max_loss": None,
    "confidence": 0.95,
    "slices": None,
}
SAMPLES = 100_000
SMALLEST_P = 1 / (1 + SAMPLES)
SPLITS = {"train": range(12), "validation": range(12, 14), "test": range(14, 18)}
# A higher or lower score by role: the loss of one token.
LOSSES = {
    "accepted": {"candidate": 1.0, "base": 2.0, "incumbent": 1.5},
    "refused": dict.fromkeys(("candidate", "base", "incumbent"), 2.0),
}


def build_row(number: int, topic: str = "") -> dict[str, Any]:
    """Return a conversation that differs from the rows of other numbers and topics in most words."""
    chosen = [WORDS[(number * step + step) % len(WORDS)] for step in range(1, 12)]
    question = f"What does {chosen[0]} {chosen[1]} number {number} {topic} mean for the {chosen[2]}?"
    answer = " ".join(f"{word}{number}{topic}" for word in chosen)
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"id": f"row-{topic}{number}", "messages": messages, "tools": None, "source": "a", "meta": None}


def build_dataset(folder: Path, splits: dict[str, list[dict[str, Any]]] | None = None, topic: str = "") -> Artifact:
    """Publish a dataset; default: 18 different rows."""
    rows = splits or {name: [build_row(number, topic) for number in numbers] for name, numbers in SPLITS.items()}
    artifact_folder.claim_folder(folder, f"dataset {topic}", overwrite=True)
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    schema = pa.schema(
        [
            ("id", pa.string()),
            ("messages", pa.list_(message)),
            ("tools", pa.string()),
            ("source", pa.string()),
            ("meta", pa.string()),
        ]
    )
    for name, content in rows.items():
        parquet.write_table(pa.Table.from_pylist(content, schema=schema), folder / f"{name}.parquet")
    return artifact_folder.publish(
        folder,
        "dataset",
        payload=[f"{name}.parquet" for name in rows],
        inputs=[],
        config={},
        seed=1,
        key=f"dataset {topic}",
        summary={"rows_kind": "sft", "splits": {name: len(content) for name, content in rows.items()}},
    )


def read_test_rows(dataset: Artifact) -> list[dict[str, Any]]:
    return parquet.read_table(dataset.path / "test.parquet").to_pylist()


def build_evaluation(
    folder: Path,
    model: Manifest,
    dataset: Artifact,
    verdict: str = "accepted",
    *,
    incumbent: str | None = None,
    rows: Sequence[dict[str, Any]] | None = None,
    task: str = "held_out",
    rules: Sequence[dict[str, Any]] = (RULE,),
    min_items: int = 2,
    files: dict[str, str] | None = None,
    acceptance_p: float | None = None,
    split: str = "",
    near_duplicate_threshold: float | None = None,
) -> Artifact:
    """Publish an evaluation whose verdict follows from its predictions.

    Args:
        acceptance_p: p-value of the first rule, which `split_reuse` reads; None for the smallest one.
        split: digest of the evaluated items.
    """
    roles = ("candidate", "base", *(("incumbent",) if incumbent else ()))
    losses = LOSSES["refused" if verdict == "refused" else "accepted"]
    base = model.find_input("base_model")
    assert base is not None
    rules = [{**rule, "metric": f"{task}.loss"} for rule in rules]
    results = []
    for rule in rules:
        gain = losses[rule["against"]] - losses["candidate"]
        holds = (rule["against"] == "incumbent" and not incumbent) or verdict != "refused"
        results.append(
            {
                **rule,
                "holds": holds,
                "reason": f"The candidate is {verdict}.",
                "gain": [gain] * 3,
                "at_least": gain,
                "p": None,
                "acceptance_p": SMALLEST_P if results or acceptance_p is None else acceptance_p,
                "harmed_items": None,
                "unjudged_slices": 0,
            }
        )
    chosen = read_test_rows(dataset) if rows is None else list(rows)
    metrics = {task: {"loss": {role: losses[role] if role in roles else None for role in LOSSES["accepted"]}}}
    metrics[task]["loss"] |= {"ci95": None, "n": len(chosen)}
    reasons = [rule["reason"] for rule in results]
    if verdict == "unchanged":
        reasons = ["The candidate is identical to the incumbent.", *reasons]
    settings = {
        "min_items": min_items,
        "max_items": None,
        "max_length": None,
        "batch_tokens": 8,
        "bootstrap_samples": SAMPLES,
        "gate": rules,
    }
    content = {
        "verdict": verdict,
        "reasons": reasons,
        "metrics": metrics,
        "rules": results,
        "tasks": {
            task: {
                "sha256": "7" * 64,
                "items": len(chosen),
                "items_sha256": split,
                "metrics": {"loss": {"better": "lower", "exponential": False}},
            }
        },
        "measured": {
            "model": {
                "content_sha256": model.content_sha256,
                "inputs": sorted([one.kind, one.content_sha256] for one in model.inputs),
            },
            "base_model": base.content_sha256,
            "incumbent": incumbent or None,
            "dataset": {
                "content_sha256": dataset.sha256,
                "splits": {file.path: file.sha256 for file in dataset.manifest.files},
                "near_duplicate_threshold": near_duplicate_threshold,
            },
            "evaluation_sets": sorted((files or {}).values()),
            "tasks": {task: task},
            "task_files": {task: sorted((files or {}).values())},
            "engine": "transformers",
            "settings": {**settings, "seed": 1},
        },
    }
    artifact_folder.claim_folder(folder, f"evaluation {verdict}", overwrite=True)
    (folder / "evaluation.json").write_text(json.dumps(content, indent=2, sort_keys=True))
    write_predictions(folder / "predictions.parquet", chosen, task, {role: losses[role] for role in roles})
    (folder / "weights").mkdir()
    (folder / "weights" / "payload.bin").write_text(folder.name)
    inputs = [
        ArtifactInput(kind="model", content_sha256=model.content_sha256, uri=f"store:{model.content_sha256}"),
        ArtifactInput(kind="dataset", content_sha256=dataset.sha256, uri=str(dataset.path)),
        base,
    ]
    if incumbent:
        inputs.append(ArtifactInput(kind="incumbent", content_sha256=incumbent, uri=f"store:{incumbent}"))
    inputs += [
        ArtifactInput(kind="evaluation_set", content_sha256=sha256, uri=path) for path, sha256 in (files or {}).items()
    ]
    config = {"tasks": [{"kind": task, "name": task}], **settings}
    return artifact_folder.publish(
        folder,
        "evaluation",
        payload=["evaluation.json", "predictions.parquet", "weights/payload.bin"],
        inputs=inputs,
        config=config,
        seed=1,
        key=f"evaluation {verdict}",
        summary={name: content[name] for name in ("verdict", "reasons", "metrics")},
    )


def write_predictions(path: Path, rows: Sequence[dict[str, Any]], task: str, losses: dict[str, float]) -> None:
    """Write predictions with equal scores on every row."""
    written = []
    for row in rows:
        prompt, answer = (message["content"] for message in row["messages"])
        written.append(
            {
                "id": row["id"],
                "task": task,
                "prompt": prompt,
                "reference": answer,
                "weights": json.dumps({"loss": 2.0}),
                **{f"{role}_scores": json.dumps({"loss": 2 * loss}) for role, loss in losses.items()},
            }
        )
    parquet.write_table(pa.Table.from_pylist(written), path)


def build_package(folder: Path, model: Artifact, *, proof: bool = True) -> Artifact:
    """Publish a package with a proof of two prompts, or without."""
    statement = {"server_version": "2.1", "golden_prompts": 2, "matched": 2} if proof else None
    inputs = [model.as_input()]
    details = {**statement, "answers": [{"match": "exact"}] * 2} if statement else {"proof": None}
    artifact_folder.claim_folder(folder, "repository", overwrite=True)
    (folder / "weights").mkdir()
    (folder / "weights" / "payload.bin").write_text(model.sha256)
    pairs = [[one.kind, one.content_sha256] for one in inputs]
    (folder / "proof.json").write_text(json.dumps({"inputs": pairs, **details}))
    return artifact_folder.publish(
        folder,
        "repository",
        payload=["weights/payload.bin", "proof.json"],
        inputs=inputs,
        config={},
        seed=1,
        key="repository",
        summary={"proof": {**statement, "ready_seconds": 1.5} if statement else None},
    )
