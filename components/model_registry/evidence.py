"""Evidence of a candidate: whether its evaluation and its package state what was measured, and agree with the model.

Registration, promotion, rollback, deployment and the audit use these checks. A check returns objections: clauses that
complete the sentence "version N cannot be promoted: …".
"""

# The digest of an artifact covers its payload, not its manifest. The evaluation therefore states in evaluation.json, and
# a package in proof.json, on what it was made. Without signatures, a consistent forgery of all files remains possible;
# see docs/how-to/signing.md.

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from components.common.artifacts import hashing
from components.common.artifacts.artifact_folder import Artifact, ArtifactInput, Manifest
from components.common.gate_rules import (
    MAX_QUANTIZATION_MARGIN,
    MIN_QUANTIZATION_ITEMS,
    QUANTIZATION_CONFIDENCE,
    get_min_items,
)
from components.common.models.quantizations import QUANTIZATIONS
from components.common.runtime.counts import format_count
from components.model_registry import rule_results, rule_strictness, sampled_scores
from components.model_registry.rule_results import RELATIVE_TOLERANCE

Json = dict[str, Any]
EVALUATION_FILENAME, PREDICTIONS_FILENAME, PROOF_FILENAME = "evaluation.json", "predictions.parquet", "proof.json"
EARLIER_EVALUATION = "its evaluation does not state what it measured; an earlier version of tuneline wrote it"
EARLIER_PACKAGE = "its Triton package does not cover its proof; an earlier version of tuneline wrote it"
VERDICT_OBJECTION = "its evaluation's verdict is"
MIN_SCHEMA_VERSION = 2  # of manifests whose identity covers the statement
# In summary.proof and in proof.json; timings are only in the summary.
PROOF_FIELDS = ("server_version", "golden_prompts", "matched")


def states_subject(evaluation: Artifact) -> bool:
    """Return whether the evaluation's identity covers what was measured, unlike that of earlier versions."""
    return evaluation.manifest.schema_version >= MIN_SCHEMA_VERSION and "measured" in read_content(evaluation)


def covers_proof(repository: Artifact) -> bool:
    """Return whether the package's identity covers its proof, unlike that of earlier versions."""
    is_payload = any(file.path == PROOF_FILENAME and file.payload for file in repository.manifest.files)
    return repository.manifest.schema_version >= MIN_SCHEMA_VERSION and is_payload


def read_content(evaluation: Artifact) -> Json:
    """Return the content of evaluation.json; an empty object if the file is missing or not an object."""
    return _read_object(evaluation, EVALUATION_FILENAME)


def _read_object(artifact: Artifact, name: str) -> Json:
    try:
        content = json.loads((artifact.path / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def check_evaluation(evaluation: Artifact, model: Manifest) -> list[str]:
    """Return the objections to an evaluation: it measured another subject, or contradicts itself.

    Args:
        evaluation: the evaluation; every digest is verified.
        model: the manifest of the model to promote.
    """
    if not states_subject(evaluation):
        return [EARLIER_EVALUATION]
    content = read_content(evaluation)
    try:
        return [
            *check_subject(content["measured"], model),
            *_check_manifest(evaluation.manifest, content),
            *_check_verdict(content),
            *_check_metrics(evaluation, content),
        ]
    except list_content_errors() as error:
        return [describe_content_error(error)]


def list_content_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that the checks raise if a file of an evaluation has an unexpected structure."""
    from pyarrow import ArrowException

    return (
        AttributeError,
        ArithmeticError,
        ArrowException,
        LookupError,
        OSError,
        RecursionError,
        TypeError,
        ValueError,
    )


def describe_content_error(error: BaseException) -> str:
    """Return the objection to an evaluation whose files have an unexpected structure."""
    return f"its evaluation cannot be read ({type(error).__name__}: {error})"


def check_subject(measured: Json, model: Manifest) -> list[str]:
    """Compare the measured model, its inputs and its base model with the manifest of the model."""
    stated, objections = measured["model"]["content_sha256"], []
    if stated != model.content_sha256:
        objections.append(f"its evaluation measured another model: {stated[:12]}")
    elif measured["model"].get("kind", "model") != model.kind:  # the digest covers the weights, and not the kind
        objections.append(f"the kind in its model's manifest, {model.kind}, differs from that at its evaluation")
    elif measured["model"]["inputs"] != sorted([one.kind, one.content_sha256] for one in model.inputs):
        objections.append("the inputs in its model's manifest differ from those at its evaluation")
    base = model.find_input("base_model")
    if base is None or measured["base_model"] != base.content_sha256:
        tuned_from = base.content_sha256[:12] if base else "an unrecorded model"
        objections.append(
            f"its evaluation compared it with base model {measured['base_model'][:12]}; the model was tuned from {tuned_from}"
        )
    return objections


def check_dataset(evaluation: Artifact, model: Manifest) -> list[str]:
    """Return an objection to an evaluation on another dataset than the one that the model was trained on."""
    return compare_dataset(read_content(evaluation)["measured"], model)


def compare_dataset(measured: Json, model: Manifest) -> list[str]:
    """Return the objection of `check_dataset` to the statement in an evaluation.json."""
    used = measured["dataset"]["content_sha256"]
    source = model.find_input("dataset")
    if source is not None and source.content_sha256 == used:
        return []
    trained_on = source.content_sha256[:12] if source else "an unrecorded dataset"
    return [f"its evaluation used dataset {used[:12]}; the model was trained on {trained_on}"]


def _check_manifest(manifest: Manifest, content: Json) -> list[str]:
    """Compare the manifest of the evaluation, which its digest does not cover, with evaluation.json."""
    measured, config = content["measured"], manifest.config
    stated = [
        [measured["model"].get("kind", "model"), measured["model"]["content_sha256"]],
        ["dataset", measured["dataset"]["content_sha256"]],
        ["base_model", measured["base_model"]],
        *([["incumbent", measured["incumbent"]]] if measured["incumbent"] else []),
        *(["evaluation_set", sha256] for sha256 in measured["evaluation_sets"]),
    ]
    settings = {**{name: config.get(name) for name in measured["settings"]}, "seed": manifest.seed}
    kinds = {task.get("name") or task["kind"]: task["kind"] for task in config["tasks"]}
    differences = {
        "inputs": sorted(stated) != sorted([one.kind, one.content_sha256] for one in manifest.inputs),
        "config or seed": measured["settings"] != settings or measured["tasks"] != kinds,
        "evaluation sets": "task_files" in measured
        and {*chain(*measured["task_files"].values())} != {*measured["evaluation_sets"]},
        "config_sha256": manifest.config_sha256 != hashing.digest(config),
        **{
            f"summary.{name}": manifest.summary.get(name) != content[name] for name in ("verdict", "reasons", "metrics")
        },
    }
    return [
        f"{name} in the manifest of its evaluation contradicts evaluation.json" for name, d in differences.items() if d
    ]


def _check_verdict(content: Json) -> list[str]:
    """Check that the verdict and the reasons follow from the results of the rules."""
    rules, gate, measured = content["rules"], content["measured"]["settings"]["gate"], content["measured"]
    settings = [{name: rule.get(name) for name in wanted} for rule, wanted in zip(rules, gate, strict=False)]
    objections = []
    if not rules or len(rules) != len(gate) or settings != gate:
        objections.append("the rules in its evaluation differ from those of its gate")
    is_unchanged = measured["incumbent"] == measured["model"]["content_sha256"]
    expected = "accepted" if rules and all(rule["holds"] is True for rule in rules) else "refused"
    expected = "unchanged" if is_unchanged else expected
    if content["verdict"] != expected:
        objections.append(f"its evaluation's verdict is {content['verdict']}, but its rules give {expected}")
    if content["reasons"][-len(rules) or len(rules) :] != [rule["reason"] for rule in rules]:
        objections.append("the reasons in its evaluation differ from those of its rules")
    return objections


def _check_metrics(evaluation: Artifact, content: Json) -> list[str]:
    """Recompute every metric and the results of the rules that hold from the scores of the items."""
    rows = read_predictions(evaluation)
    objections = []
    if {row["task"] for row in rows} != set(content["tasks"]) or set(content["tasks"]) != set(
        content["measured"]["tasks"]
    ):
        return ["the tasks in its evaluation differ from those of its predictions"]
    by_task: dict[str, list[Json]] = defaultdict(list)
    for row in rows:
        by_task[row["task"]].append(row)
    for name, task in content["tasks"].items():
        if task["items"] != len(by_task[name]):
            objections.append(
                f"the number of items of {name} in its evaluation is {task['items']}; its predictions have "
                f"{len(by_task[name])}"
            )
        for metric, definition in task["metrics"].items():
            key = f"{name}.{metric}"
            values = {
                role: rule_results.compute_metric(by_task[name], role, metric, exponential=definition["exponential"])
                for role in ("candidate", "base", "incumbent")
            }
            reported = content["metrics"][name][metric]
            different = [
                role
                for role, value in values.items()
                if reported[role] is not None and not _is_close(reported[role], value)
            ]
            if different:
                objections.append(f"{key} of the {different[0]} in its evaluation does not follow from its predictions")
            elif reported["n"] != len(by_task[name]):
                objections.append(
                    f"the number of items of {key} in its evaluation is {reported['n']}; its predictions have "
                    f"{len(by_task[name])}"
                )
    sampled = sampled_scores.check_samples(by_task, evaluation.manifest.config["tasks"])
    return [*objections, *sampled, *rule_results.check_results(content, by_task)]


def _is_close(reported: float, value: float | None) -> bool:
    return value is not None and math.isclose(reported, value, rel_tol=RELATIVE_TOLERANCE, abs_tol=RELATIVE_TOLERANCE)


def read_predictions(evaluation: Artifact) -> list[Json]:
    """Return the rows of predictions.parquet."""
    from pyarrow import parquet

    rows: list[Json] = parquet.read_table(evaluation.path / PREDICTIONS_FILENAME).to_pylist()
    return rows


def check_package(
    repository: Artifact, model_sha256: str, dataset: ArtifactInput | None, evaluation: Artifact | None = None
) -> list[str]:
    """Return the objections to a package: it has no proof, its proof was edited, or it was built from another model.

    Args:
        dataset: the dataset that the model was trained on, on which a package with quantized weights must be measured.
        evaluation: the evaluation of the version, which must have measured the weights of the package; None if it cannot be
            read, which is another objection.
    """
    try:
        objections = _check_package(repository, model_sha256, dataset)
    except list_content_errors() as error:
        return [f"its Triton package cannot be read ({type(error).__name__}: {error})"]
    packaged = repository.manifest.config.get("quantization", "none")
    try:
        if evaluation is None or not states_subject(evaluation):
            return objections
        subject = read_content(evaluation)["measured"]
        evaluated = subject["settings"].get("quantization", "none")
        records = [repository.manifest.summary.get("quantization") or {}, subject]
        weights = [record.get("calibration", {}).get("weights_sha256", "") for record in records]
        is_calibrated = packaged in QUANTIZATIONS and QUANTIZATIONS[packaged].is_calibrated
    except list_content_errors() as error:
        return [*objections, describe_content_error(error)]
    if evaluated != packaged:
        objections.append(f"its Triton package has {packaged} quantization; its evaluation measured {evaluated}")
    elif weights[0] != weights[1] or (is_calibrated and not weights[0]):
        names = [digest[:12] or "without a digest" for digest in weights]
        objections.append(
            f"its Triton package has the calibrated weights {names[0]}; its evaluation measured {names[1]}"
        )
    return objections


def _check_package(repository: Artifact, model_sha256: str, dataset: ArtifactInput | None) -> list[str]:
    manifest, statement = repository.manifest, _read_object(repository, PROOF_FILENAME)
    source, proof = manifest.find_input("model"), manifest.summary.get("proof")
    objections = [] if proof else ["its Triton package is unproven"]
    if source is None or source.content_sha256 != model_sha256:
        objections.append("its Triton package was built from another model")
    if not covers_proof(repository):
        return [*objections, EARLIER_PACKAGE]
    if statement.get("inputs") != [[one.kind, one.content_sha256] for one in manifest.inputs]:
        objections.append("inputs in the manifest of its Triton package contradict proof.json")
    recorded = {name: statement.get(name) for name in PROOF_FIELDS}
    if proof and recorded != {name: proof.get(name) for name in PROOF_FIELDS}:
        objections.append("summary.proof of its Triton package contradicts proof.json")
    objections += _check_quantization(manifest, statement, dataset)
    if proof and not (recorded["matched"] == recorded["golden_prompts"] == len(statement.get("answers", []))):
        objections.append("the proof of its Triton package does not match every golden prompt")
    return objections


def _check_quantization(manifest: Manifest, statement: Json, dataset: ArtifactInput | None) -> list[str]:
    """Return the objections to the comparison in the proof.json of a package with quantized weights."""
    measured, scheme = statement.get("quantization"), manifest.config.get("quantization", "none")
    if measured != manifest.summary.get("quantization"):
        return ["summary.quantization of its Triton package contradicts proof.json"]
    if scheme != (measured["scheme"] if measured else "none"):
        return ["config.quantization of its Triton package contradicts proof.json"]
    if not measured:
        return []
    objections, used = [], manifest.find_input("dataset")
    if used is None or dataset is None or used.content_sha256 != dataset.content_sha256:
        names = [f"dataset {one.content_sha256[:12]}" if one else "an unrecorded dataset" for one in (used, dataset)]
        objections.append(f"its Triton package used {names[0]}; the model was trained on {names[1]}")
    margin = measured["margin"]
    is_within = measured["increase_bound"] <= margin == manifest.config["quantization_margin"]
    is_sufficient = measured["items"] >= MIN_QUANTIZATION_ITEMS and measured["confidence"] >= QUANTIZATION_CONFIDENCE
    if not (is_within and is_sufficient and margin <= MAX_QUANTIZATION_MARGIN):
        objections.append("the loss of its quantized weights is not shown to be within the margin")
    return objections


def check_rules(
    evaluation: Artifact, required: Sequence[Json], min_items: int | None, tasks: Mapping[str, Json] | None = None
) -> list[str]:
    """Return an objection for every required rule that no rule of the evaluation replaces or exceeds.

    Args:
        evaluation: an evaluation that `check_evaluation` accepts.
        required: the rules that a promotion requires, as in `evaluation.gate`.
        min_items: `evaluation.min_items` of the required rules; None for the default.
        tasks: the tasks of the required rules by name: {kind, files, min_kappa}. `files` are the digests of the files
            that the task reads; `min_kappa` is the agreement that a judge must exceed, if any. A task that is not listed may be of any kind.
    """
    return compare_rules(read_content(evaluation), required, min_items, tasks)


def compare_rules(
    content: Json,
    required: Sequence[Json],
    min_items: int | None,
    tasks: Mapping[str, Json] | None = None,
    source: str = "the configuration",
) -> list[str]:
    """Return the objections of `check_rules` to the content of an evaluation.json; `source` states the rules."""
    found = [_check_rule(content, wanted, min_items, tasks or {}, source) for wanted in required]
    return [objection for objection in dict.fromkeys(found) if objection]


def _check_rule(content: Json, wanted: Json, min_items: int | None, tasks: Mapping[str, Json], source: str) -> str:
    """Return the objection to an evaluation without a rule as strict as the wanted one; "" if it has such a rule."""
    measured, name = content["measured"], wanted["metric"].partition(".")[0]
    rules, own_min_items = measured["settings"]["gate"], measured["settings"].get("min_items")
    own_min_items, min_items = (get_min_items(wanted["metric"], count) for count in (own_min_items, min_items))
    kind = measured["tasks"].get(name, "")
    if name in measured["tasks"] and name in tasks:
        task, files = tasks[name], measured.get("task_files", {}).get(name)
        if task["kind"] != kind:
            return f"{source} requires {name} to be a task of kind {task['kind']}; its evaluation measured kind {kind}"
        if not (set(task["files"]) <= set(measured["evaluation_sets"] if files is None else files)):
            return f"its evaluation measured {name} on other files than those of {source}"
        if problem := rule_results.find_kappa_problem(content, name, task.get("min_kappa"), source):
            return problem
    found = [rule for rule in rules if rule_strictness.is_as_strict(rule, wanted, kind)]
    if not found:
        return f"{source} requires a rule as strict as {describe_rule(wanted)}; its evaluation does not include one"
    if wanted.get("slices"):
        # More items per slice exclude slices; fewer items add slices to the correction.
        own, needed = own_min_items or rule_strictness.MIN_ITEMS, min_items or rule_strictness.MIN_ITEMS
        if own != needed:
            return f"its evaluation judged slices of at least {own} items; {source} requires {needed}"
    if own_min_items == min_items and any(rule_strictness.requires_as_many_items(rule, wanted) for rule in found):
        return ""
    items, needed = content["tasks"][name]["items"], rule_strictness.compute_min_items(wanted, min_items, kind)
    if items < needed:
        return (
            f"its evaluation measured {wanted['metric']} on {format_count(items, 'item')}; {source} requires {needed}"
        )
    return ""


def describe_rule(rule: Json) -> str:
    """Return the settings of a rule that are not null."""
    shown = {name: value for name, value in rule.items() if value is not None}
    return ", ".join(f"{name}: {value}" for name, value in shown.items())
