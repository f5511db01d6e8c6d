"""Evidence of a candidate: forged, swapped and contaminated evaluations and packages are refused with the reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow import parquet

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact, ArtifactInput
from components.common.models import model_loading, training_lineage
from components.common.runtime.errors import ArtifactDamagedError, EngineMissingError, RegistryError
from components.common.workspace import artifact_store
from components.model_registry import (
    evidence,
    lineage_tags,
    promotion_checks,
)
from components.model_registry.promotion_checks import Requirements
from tests.manifests import read_fields, reseal
from tests.model_registry.conftest import build
from tests.model_registry.evidence_builder import (
    RULE,
    build_dataset,
    build_evaluation,
    build_package,
    build_row,
    write_predictions,
)
from tests.tiny import tiny_model

DEFAULT = Requirements()
BASE = ArtifactInput(kind="base_model", content_sha256="ba5e" * 16, uri="embedded:tiny")


@dataclass(frozen=True)
class Candidate:
    """The artifacts of a candidate."""

    folder: Path
    dataset: Artifact
    model: Artifact
    evaluation: Artifact
    repository: Artifact

    def list_objections(self, requirements: Requirements = DEFAULT, **tags: str) -> list[str]:
        """Return the objections to a version with these artifacts, as they are now on disk."""
        artifacts = [
            artifact_folder.Artifact(one.path, artifact_folder.read_manifest(one.path))
            for one in (self.model, self.evaluation, self.repository)
        ]
        built = lineage_tags.build_version_tags(*artifacts, None, "")
        version: Any = SimpleNamespace(name="helper", version="1", tags=built | tags, aliases=[])
        return promotion_checks.list_objections(version, requirements)


def build_model(folder: Path, dataset: Artifact, *inputs: ArtifactInput, content: str = "one") -> Artifact:
    return build(folder, "model", content, [dataset.as_input(str(dataset.path)), *(inputs or (BASE,))], {"steps": 3})


@pytest.fixture
def candidate(tmp_path: Path) -> Candidate:
    """An accepted candidate with a proven package."""
    dataset = build_dataset(tmp_path / "dataset")
    model = build_model(tmp_path / "model", dataset)
    evaluation = build_evaluation(tmp_path / "evaluation", model.manifest, dataset)
    return Candidate(tmp_path, dataset, model, evaluation, build_package(tmp_path / "repository", model))


def rewrite_content(evaluation: Artifact, change: Any) -> Artifact:
    """Change evaluation.json, and publish the evaluation with all digests that follow from the change."""
    path = evaluation.path / "evaluation.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return republish(evaluation, {name: content[name] for name in ("verdict", "reasons", "metrics") if name in content})


def republish(artifact: Artifact, summary: dict[str, Any] | None = None) -> Artifact:
    """Publish the files of an artifact as they are now."""
    old = artifact.manifest
    (artifact.path / "manifest.json").unlink()
    return artifact_folder.publish(
        artifact.path,
        old.kind,
        payload=[file.path for file in old.files if file.payload],
        inputs=old.inputs,
        config=old.config,
        seed=old.seed,
        key="k",
        summary=old.summary if summary is None else summary,
    )


def test_consistent_candidate_has_no_objections(candidate: Candidate) -> None:
    assert candidate.list_objections() == []


def test_evaluation_on_a_second_dataset_of_training_rows_is_refused(candidate: Candidate) -> None:
    rows = parquet.read_table(candidate.dataset.path / "train.parquet").to_pylist()
    splits = {"train": [build_row(n, "z") for n in range(4)], "validation": [], "test": rows}
    other = build_dataset(candidate.folder / "other", splits)
    build_evaluation(candidate.evaluation.path, candidate.model.manifest, other)
    [objection] = candidate.list_objections()
    assert objection.startswith(f"its evaluation used dataset {other.sha256[:12]}; the model was trained on")


@pytest.mark.parametrize(("edit", "relation"), [("", "equals"), (" indeed", "has the similarity 0.9")])
def test_evaluated_training_rows_of_a_file_are_refused(candidate: Candidate, edit: str, relation: str) -> None:
    rows = [build_row(n) for n in (3, 4)]
    for row in rows:
        row["messages"][1]["content"] += edit
    build_evaluation(
        candidate.evaluation.path, candidate.model.manifest, candidate.dataset, rows=rows, task="generation",
        files={"rows.jsonl": "f" * 64},
    )  # fmt: skip
    [objection] = candidate.list_objections()
    assert objection.startswith("the model was trained on 2 of its evaluated rows: row row-3 " + relation)


@pytest.mark.parametrize("item_id", ["row-fresh1", "row-14"])  # row-14 is a row of the test split
def test_evaluated_question_of_a_training_row_is_refused(candidate: Candidate, item_id: str) -> None:
    rows = [build_row(n, "fresh") for n in range(3)]
    rows[1]["id"] = item_id
    question = build_row(4)["messages"][0]["content"]
    for row, prompt in zip(rows, ("What does it mean?", question, "Which one is it?"), strict=True):
        row["messages"][0]["content"] = f"Answer with the letter of one option.\n{prompt}\nA. early\nB. late"
        row["messages"][1]["content"] = "B"
    build_evaluation(
        candidate.evaluation.path, candidate.model.manifest, candidate.dataset, rows=rows, task="generation",
        files={"rows.jsonl": "f" * 64},
    )  # fmt: skip
    [objection] = candidate.list_objections()
    assert f"1 of its evaluated rows: row {item_id} shares its question with the training row row-4" in objection


def test_test_row_may_share_its_question_with_a_training_row(candidate: Candidate) -> None:
    trained, tested = build_row(4), build_row(14)
    tested["messages"][0] = trained["messages"][0]
    dataset = build_dataset(
        candidate.folder / "asked", {"train": [trained], "validation": [], "test": [tested, build_row(15)]}
    )
    model = build_model(candidate.model.path, dataset, content="asked")
    build_package(candidate.repository.path, model)
    for task in ("held_out", "generation"):
        build_evaluation(candidate.evaluation.path, model.manifest, dataset, task=task)
        assert candidate.list_objections() == []


def test_training_row_in_the_test_split_is_refused(candidate: Candidate) -> None:
    splits = {"train": [build_row(n) for n in range(5)], "validation": [], "test": [build_row(n) for n in (7, 4)]}
    dataset = build_dataset(candidate.folder / "leaky", splits)
    model = build_model(candidate.model.path, dataset, content="leaky")
    build_evaluation(candidate.evaluation.path, model.manifest, dataset)
    build_package(candidate.repository.path, model)
    [objection] = candidate.list_objections()
    assert "trained on 1 of its evaluated rows: row row-4 equals the training row row-4" in objection


@pytest.mark.parametrize("kind", ["initial_adapter", "base_model"])
def test_rows_that_an_ancestor_was_trained_on_are_refused(candidate: Candidate, kind: str) -> None:
    parent_data = build_dataset(
        candidate.folder / "parent-data",
        {"train": [build_row(15)], "validation": [], "test": [build_row(40), build_row(41)]},
    )
    parent = build_model(candidate.folder / "parent", parent_data, content="parent")
    source = ArtifactInput(kind=kind, content_sha256=parent.sha256, uri=str(parent.path))
    base = [] if kind == "base_model" else [BASE]
    model = build_model(candidate.model.path, candidate.dataset, source, *base, content="tuned again")
    build_evaluation(candidate.evaluation.path, model.manifest, candidate.dataset)
    build_package(candidate.repository.path, model)
    [objection] = candidate.list_objections()
    assert f"row row-15 equals the training row row-15 of dataset {parent_data.sha256[:12]}" in objection
    shutil.rmtree(parent.path)
    name = kind.replace("_", " ")
    assert candidate.list_objections()[0].startswith(f"the {name} {parent.sha256[:12]} of its lineage is not in ")


@pytest.mark.parametrize("present", [True, False])
def test_base_model_in_a_folder_must_be_present_with_its_digest(candidate: Candidate, present: bool) -> None:
    base = tiny_model(candidate.folder / "base")
    sha256 = model_loading.resolve_base_model(str(base)).sha256 if present else "ba5e" * 16
    source = ArtifactInput(kind="base_model", content_sha256=sha256, uri=str(base))
    model = build_model(candidate.model.path, candidate.dataset, source, content="of a folder")
    build_evaluation(candidate.evaluation.path, model.manifest, candidate.dataset)
    build_package(candidate.repository.path, model)
    missing = f"the base model {sha256[:12]} of its lineage is not in {base} or in the artifact store, so its"
    assert [each[: len(missing)] for each in candidate.list_objections()] == ([] if present else [missing])


def test_unreachable_store_is_not_an_objection(candidate: Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(uri: str) -> Path | None:
        if candidate.dataset.sha256 in uri:
            raise EngineMissingError(f"the store of {uri} does not answer")
        return None

    shutil.rmtree(candidate.dataset.path)
    monkeypatch.setattr(artifact_store, "resolve_artifact_uri", resolve)
    with pytest.raises(EngineMissingError, match="does not answer"):
        training_lineage.collect_datasets([candidate.model.manifest], candidate.model.path.as_uri())
    build_dataset(candidate.dataset.path)
    lineage = training_lineage.collect_datasets([candidate.model.manifest], candidate.model.path.as_uri())
    assert [*lineage.datasets] == [candidate.dataset.sha256]


@pytest.mark.parametrize("threshold", [0.99, 5, "none", None])
def test_threshold_in_a_changed_manifest_allows_no_near_duplicates(candidate: Candidate, threshold: Any) -> None:
    rows = [build_row(n) for n in (3, 4)]
    for row in rows:
        row["messages"][1]["content"] += " indeed"
    build_evaluation(
        candidate.evaluation.path, candidate.model.manifest, candidate.dataset, rows=rows, task="generation",
        files={"rows.jsonl": "f" * 64},
    )  # fmt: skip
    config = {"near_duplicate_threshold": threshold}
    summary = read_fields(candidate.dataset.path)["summary"]
    reseal(candidate.dataset.path, config=config, summary=summary | {"rows_kind": "text"})
    [objection] = candidate.list_objections()
    assert objection.startswith("the model was trained on 2 of its evaluated rows: row row-3 has the similarity 0.9")


def test_rows_are_near_duplicates_by_the_threshold_of_the_evaluated_dataset(candidate: Candidate) -> None:
    test_row, near, equal = build_row(14), build_row(14), build_row(15)
    near["messages"][1]["content"] += " indeed"
    train = [*(build_row(n) for n in range(12)), near]
    splits = {"train": train, "validation": [build_row(12)], "test": [test_row, equal]}
    for extra, threshold, similar in (([], 0.99, 0), ([], 0.7, 1), ([equal], 0.99, 1), ([], None, 1), ([], 7, 1)):
        dataset = build_dataset(candidate.folder / "near", {**splits, "train": [*train, *extra]}, topic="near")
        model = build_model(candidate.model.path, dataset, content="near")
        build_evaluation(candidate.evaluation.path, model.manifest, dataset, near_duplicate_threshold=threshold)
        build_package(candidate.repository.path, model)
        counted = [f"the model was trained on {similar} of its evaluated rows"] if similar else []
        assert [each.partition(":")[0] for each in candidate.list_objections()] == counted


def test_kind_of_rows_follows_from_the_columns(candidate: Candidate) -> None:
    summary = read_fields(candidate.dataset.path)["summary"]
    reseal(candidate.dataset.path, summary=summary | {"rows_kind": "text"})
    rows = [{**build_row(n, "easy"), "id": f"row-{n}"} for n in range(14, 18)]
    build_evaluation(candidate.evaluation.path, candidate.model.manifest, candidate.dataset, rows=rows)
    [objection] = candidate.list_objections()
    assert objection.startswith("row row-14 of its evaluation differs from the row of dataset")


def state_coverage(max_items: int | None, left_out: int) -> Any:
    def change(content: Any) -> None:
        content["measured"]["held_out"] = {"held_out": {"max_items": max_items, "left_out": left_out}}

    return change


@pytest.mark.parametrize(
    ("numbers", "max_items", "left_out", "objection"),
    [
        ((14, 15, 16, 17), None, 0, ""),
        ((14, 16, 17), None, 1, ""),
        ((14, 15), 2, 0, ""),
        ((14, 15, 16), None, 0, "its evaluation measured held_out on 3 of 4 test rows and states that it left out 0"),
        ((14, 15), 3, 0, "its evaluation measured held_out on 2 of 3 test rows and states that it left out 0"),
        ((16, 17), 2, 0, "row row-16 of its evaluation is not among the first 2 test rows"),
        ((14, 15, 15, 15), None, 0, "its evaluation repeats rows of held_out: 4 items are 2 rows"),
        (
            (14, 15, 16, 17),
            None,
            -1,
            "its evaluation measured held_out on 4 of 4 test rows and states that it left out -1",
        ),
    ],
)
def test_evaluation_of_a_part_of_the_test_split_is_refused(
    candidate: Candidate, numbers: tuple[int, ...], max_items: int | None, left_out: int, objection: str
) -> None:
    rows = [build_row(number) for number in numbers]
    evaluation = build_evaluation(candidate.evaluation.path, candidate.model.manifest, candidate.dataset, rows=rows)
    rewrite_content(evaluation, state_coverage(max_items, left_out))
    found = [f"{objection} of dataset {candidate.dataset.sha256[:12]}"] if objection else []
    assert candidate.list_objections() == found


def test_part_of_the_test_split_without_a_statement_is_refused(candidate: Candidate) -> None:
    rows = [build_row(number) for number in (14, 15)]
    build_evaluation(candidate.evaluation.path, candidate.model.manifest, candidate.dataset, rows=rows)
    [objection] = candidate.list_objections()
    assert objection.startswith("its evaluation measured held_out on 2 of 4 test rows and states that it left out 0")


def drop_prompts(folder: Path) -> None:
    path = folder / "predictions.parquet"
    parquet.write_table(parquet.read_table(path).drop_columns("prompt"), path)


def write_text(name: str, text: str) -> Any:
    return lambda folder: (folder / name).write_text(text)


def replace_tasks(folder: Path) -> None:
    content = json.loads((folder / "evaluation.json").read_text())
    (folder / "evaluation.json").write_text(json.dumps(content | {"tasks": []}))


@pytest.mark.parametrize(
    ("change", "objection"),
    [
        (drop_prompts, "its evaluation cannot be read (KeyError: 'prompt')"),
        (replace_tasks, "the tasks in its evaluation differ from those of its predictions"),
        (write_text("predictions.parquet", "no table"), "its evaluation cannot be read ("),
        (write_text("evaluation.json", "[" * 100_000), "evaluation.json records no verdict"),
        (
            write_text("evaluation.json", '{"verdict": "accepted", "measured": [], "rules": 1}'),
            "its evaluation cannot be read (",
        ),
    ],
)
def test_malformed_evaluation_is_refused(candidate: Candidate, change: Any, objection: str) -> None:
    tags = lineage_tags.build_version_tags(candidate.model, candidate.evaluation, candidate.repository, None, "")
    change(candidate.evaluation.path)
    changed = republish(candidate.evaluation)
    tags["tuneline.evaluation_sha256"] = changed.sha256
    version: Any = SimpleNamespace(name="helper", version="1", tags=tags, aliases=[])
    found = promotion_checks.list_objections(version, DEFAULT)
    assert any(objection in each for each in found)
    with suppress(RegistryError):
        lineage_tags.check_evidence(candidate.model, changed, None)


@pytest.mark.parametrize("schema", ["x", "tuneline", "tuneline/evaluation", "other/evaluation/v2", "tuneline/a/b/v2"])
def test_manifest_with_an_invalid_schema_is_refused(candidate: Candidate, schema: str) -> None:
    reseal(candidate.evaluation.path, schema=schema)
    with pytest.raises(ArtifactDamagedError, match="expected tuneline/<kind>/v<number>"):
        artifact_folder.read(candidate.evaluation.path)
    (candidate.evaluation.path / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(ArtifactDamagedError, match="is unreadable"):
        artifact_folder.read(candidate.evaluation.path)


def test_different_questions_about_one_passage_are_not_contamination(candidate: Candidate) -> None:
    passage = " ".join(
        f"{word} stands beside the {word}s of the old town" for word in ("tower", "bridge", "market", "gate")
    )

    def ask(number: int, question: str, answer: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": f"{passage}\n{question}"}, {"role": "assistant", "content": answer}]
        return {**build_row(number), "messages": messages}

    splits = {
        "train": [ask(1, "Which tower has a clock that strikes twice?", "The northern one, since the fire.")],
        "validation": [],
        "test": [ask(2, "Who built the market hall, and when?", "Guilds, in 1488."), build_row(3)],
    }
    dataset = build_dataset(candidate.folder / "passages", splits)
    model = build_model(candidate.model.path, dataset, content="passages")
    build_evaluation(candidate.evaluation.path, model.manifest, dataset)
    build_package(candidate.repository.path, model)
    assert candidate.list_objections() == []


def test_memorisation_task_may_evaluate_training_rows(candidate: Candidate) -> None:
    build_evaluation(
        candidate.evaluation.path,
        candidate.model.manifest,
        candidate.dataset,
        rows=[build_row(1), build_row(2)],
        task="memorisation",
    )
    assert candidate.list_objections() == []


def test_copied_evaluation_that_names_another_model_is_refused(candidate: Candidate) -> None:
    other = build_model(candidate.folder / "model-b", candidate.dataset, content="two")
    inputs = read_fields(candidate.evaluation.path)["inputs"]
    reseal(candidate.evaluation.path, inputs=[{**inputs[0], "content_sha256": other.sha256}, *inputs[1:]])
    build_package(candidate.repository.path, other)
    found = replace(candidate, model=other).list_objections()
    assert found[0] == f"its evaluation measured another model: {candidate.model.sha256[:12]}"
    with pytest.raises(RegistryError, match="cannot be registered: its evaluation measured another model"):
        lineage_tags.check_evidence(other, artifact_folder.read(candidate.evaluation.path), None)


def test_edited_proof_summary_is_refused(candidate: Candidate) -> None:
    build_package(candidate.repository.path, candidate.model, proof=False)
    manifest = candidate.repository.path / "manifest.json"
    proof = {"server_version": "2.1", "golden_prompts": 2, "matched": 2}
    manifest.write_text(manifest.read_text().replace('"proof": null', f'"proof": {json.dumps(proof)}'))
    with pytest.raises(ArtifactDamagedError, match=r"manifest\.json has changed since it was published"):
        artifact_folder.read(candidate.repository.path)
    reseal(candidate.repository.path, summary={"proof": proof})
    found = candidate.list_objections()
    assert "summary.proof of its Triton package contradicts proof.json" in found


def test_edited_proof_file_is_refused(candidate: Candidate) -> None:
    (candidate.repository.path / "proof.json").write_text("{}")
    [objection] = candidate.list_objections()
    assert objection.startswith("its repository cannot be verified (proof.json of the repository")


def test_hand_written_evaluation_is_refused(candidate: Candidate) -> None:
    (candidate.evaluation.path / "evaluation.json").write_text('{"verdict": "accepted", "reasons": ["Good."]}')
    republish(candidate.evaluation, {"verdict": "accepted", "reasons": ["Good."]})
    assert candidate.list_objections() == [evidence.EARLIER_EVALUATION]


def test_swapped_predictions_are_refused(candidate: Candidate) -> None:
    rows = parquet.read_table(candidate.dataset.path / "test.parquet").to_pylist()
    write_predictions(
        candidate.evaluation.path / "predictions.parquet", rows, "held_out", {"candidate": 3.0, "base": 2.0}
    )
    republish(candidate.evaluation)
    found = candidate.list_objections()
    assert found[0] == "held_out.loss of the candidate in its evaluation does not follow from its predictions"
    assert found[1] == "a rule on held_out.loss holds in its evaluation, but the gain is -1.0000"


def test_predictions_of_rows_outside_the_test_split_are_refused(candidate: Candidate) -> None:
    rows = [build_row(n, "elsewhere") for n in range(4)]
    build_evaluation(candidate.evaluation.path, candidate.model.manifest, candidate.dataset, rows=rows)
    [objection] = candidate.list_objections()
    assert objection.startswith("row row-elsewhere0 of its evaluation is not in the test split of dataset")


def test_other_texts_under_the_ids_of_test_rows_are_refused(candidate: Candidate) -> None:
    rows = [{**build_row(n, "easy"), "id": f"row-{n}"} for n in range(14, 18)]
    build_evaluation(candidate.evaluation.path, candidate.model.manifest, candidate.dataset, rows=rows)
    [objection] = candidate.list_objections()
    assert objection.startswith("row row-14 of its evaluation differs from the row of dataset")


def set_verdict(content: Any) -> None:
    content["verdict"] = "accepted"


def set_rules(content: Any) -> None:
    set_verdict(content)
    content["rules"][0]["holds"] = True


def set_scores(content: Any) -> None:
    set_rules(content)
    content["rules"][0]["at_least"] = 1.0
    content["metrics"]["held_out"]["loss"]["candidate"] = 1.0


def drop_rules(content: Any) -> None:
    set_verdict(content)
    content["rules"], content["reasons"] = [], []


@pytest.mark.parametrize(
    ("change", "objection"),
    [
        (set_verdict, "its evaluation's verdict is accepted, but its rules give refused"),
        (set_rules, "a rule on held_out.loss holds in its evaluation, but the gain is +0.0000"),
        (set_scores, "held_out.loss of the candidate in its evaluation does not follow from its predictions"),
        (drop_rules, "the rules in its evaluation differ from those of its gate"),
    ],
)
def test_refused_evaluation_edited_to_accepted_is_refused(candidate: Candidate, change: Any, objection: str) -> None:
    build_evaluation(candidate.evaluation.path, candidate.model.manifest, candidate.dataset, "refused")
    rewrite_content(artifact_folder.read(candidate.evaluation.path), change)
    assert objection in candidate.list_objections()


def test_rules_weaker_than_required_are_refused(candidate: Candidate) -> None:
    strict = {**RULE, "min_gain": 0.5}
    found = candidate.list_objections(Requirements(rules=[RULE, strict], min_items=5))
    assert found == [
        "its evaluation measured held_out.loss on 4 items; the configuration requires 5",
        "the configuration requires a rule as strict as metric: held_out.loss, against: base, min_gain: 0.5, confidence: 0.95; its evaluation does not include one",
    ]
    assert candidate.list_objections(Requirements(rules=[RULE], min_items=4)) == []


def test_evidence_of_an_earlier_schema_is_accepted_only_after_a_promotion(candidate: Candidate) -> None:
    for artifact in (candidate.evaluation, candidate.repository):
        kind = artifact.manifest.kind
        reseal(artifact.path, schema=f"tuneline/{kind}/v1")
    assert candidate.list_objections() == [evidence.EARLIER_EVALUATION, evidence.EARLIER_PACKAGE]
    assert candidate.list_objections(Requirements(was_promoted=True)) == []


def test_manifest_without_its_digest_is_refused(candidate: Candidate) -> None:
    fields = {
        name: value for name, value in read_fields(candidate.evaluation.path).items() if name != "manifest_sha256"
    }
    (candidate.evaluation.path / "manifest.json").write_text(json.dumps(fields))
    with pytest.raises(ArtifactDamagedError, match="manifest_sha256 is missing"):
        artifact_folder.read(candidate.evaluation.path)


def test_partial_store_is_refused(candidate: Candidate) -> None:
    shutil.rmtree(candidate.dataset.path)
    [objection] = candidate.list_objections()
    assert objection.startswith(
        f"the dataset {candidate.dataset.sha256[:12]} of its lineage is not in the artifact store"
    )
    (candidate.evaluation.path / "predictions.parquet").unlink()
    [objection] = candidate.list_objections()
    assert "predictions.parquet of the evaluation" in objection


def test_version_tags_of_another_model_are_refused(candidate: Candidate) -> None:
    other = build_model(candidate.folder / "model-b", candidate.dataset, content="two")
    found = candidate.list_objections(
        **{"tuneline.model_sha256": other.sha256, "tuneline.store_uri": other.path.as_uri()}
    )
    assert "its evaluation measured another model" in found
    assert "its Triton package was built from another model" in found


def list_leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every field of a JSON value that is not a list or an object, and of every empty one."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not children:
        yield path
    for key, child in children:
        yield from list_leaves(child, (*path, key))


def change_leaf(fields: dict[str, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    """Return the fields with another value of the same type at a path."""
    changed = deepcopy(fields)
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    value = parent[path[-1]]
    if isinstance(value, bool):
        other: Any = not value
    elif isinstance(value, (int, float)):
        other = value + 1
    elif isinstance(value, str):
        other = ("0" if value[:1] != "0" else "1") + value[1:]
    else:
        other = {"added": 1} if isinstance(value, dict) else [1] if isinstance(value, list) else "set"
    parent[path[-1]] = other
    return changed


@pytest.mark.parametrize("kind", ["dataset", "model", "evaluation", "repository"])
def test_every_changed_field_of_a_manifest_is_refused(candidate: Candidate, kind: str) -> None:
    folder = getattr(candidate, kind).path
    fields = read_fields(folder)
    leaves = list(list_leaves(fields))
    assert len(leaves) > 20
    for path in leaves:
        (folder / "manifest.json").write_text(json.dumps(change_leaf(fields, path)))
        with pytest.raises(ArtifactDamagedError):
            artifact_folder.read(folder)
    (folder / "manifest.json").write_text(json.dumps(change_leaf(fields, ("seed",))))
    version: Any = SimpleNamespace(name="helper", version="1", tags={}, aliases=[])
    if kind != "dataset":
        version.tags = {
            f"tuneline.{kind}_sha256": getattr(candidate, kind).sha256,
            f"tuneline.{kind}_store_uri": folder.as_uri(),
        }
        version.tags["tuneline.store_uri"] = folder.as_uri()
        found = promotion_checks.list_objections(version, Requirements())
    else:
        found = candidate.list_objections()
    assert any(
        "manifest.json has changed since it was published" in each or "not in the artifact store" in each
        for each in found
    )


# Fields that another production of the same content may change. A change is detected unless the manifest's digest is
# changed too. The checks rely on none of them. The `inputs` of the model are in the evaluation; those of the models that it was tuned from are not.
UNBOUND = {
    "dataset": ("inputs", "config", "config_sha256", "seed", "produced_by", "summary"),
    "model": ("config", "config_sha256", "seed", "produced_by", "summary"),
    "evaluation": ("produced_by",),
    "repository": ("config", "config_sha256", "seed", "produced_by"),
}


@pytest.mark.parametrize("kind", sorted(UNBOUND))
def test_changed_field_under_a_new_manifest_digest_is_refused(candidate: Candidate, kind: str) -> None:
    folder = getattr(candidate, kind).path
    fields = read_fields(folder)
    accepted = []
    for path in list_leaves(fields):
        is_report = path[0] == "files" and fields["files"][path[1]]["path"] == "report.html"
        is_timing = path[-1] == "ready_seconds"
        if path[0] in UNBOUND[kind] or path[-1] in ("uri", "manifest_sha256", "schema") or is_report or is_timing:
            continue
        (folder / "manifest.json").write_text(json.dumps(change_leaf(fields, path)))
        reseal(folder)
        try:
            if not candidate.list_objections():
                accepted.append(path)
        except (ArtifactDamagedError, RegistryError):
            pass
    assert accepted == []
