"""Objections to a promotion: their remedies, and moves of an alias that are not closed yet."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from components.common.runtime.errors import RegistryError
from components.model_registry import (
    evidence,
    model_versions,
    promotion,
    promotion_checks,
    registry_history,
    servable_versions,
)
from components.model_registry.promotion_checks import Requirements
from components.model_registry.registry_history import Entry

TAGS = {"tuneline.model_sha256": "a" * 64, "tuneline.evaluation_sha256": "b" * 64}
MOVE = {"alias": "champion", "to": "1", "digest": "a" * 64, "evaluation": "b" * 64}


@pytest.mark.parametrize(
    "change", [{}, {"forced": "a reason"}, {"alias": "other"}, {"to": "2"}, {"evaluation": "e" * 64}]
)
def test_move_that_is_not_closed_yet_counts_as_a_promotion(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, str]
) -> None:
    version: Any = SimpleNamespace(name="helper", version="1", tags=TAGS, aliases=["champion"])
    sealed = Entry(number=1, kind="register", alias="candidate", to="1", state=registry_history.DONE)
    sealed = sealed.model_copy(update={"seal": registry_history.compute_seal(sealed, "")})
    pending = Entry.model_validate({"number": 2, "kind": "promote", **MOVE, **change})
    required: list[Requirements] = []

    def list_objections(_: Any, requirements: Requirements) -> list[str]:
        required.append(requirements)
        return []

    monkeypatch.setattr(model_versions, "registry_client", nullcontext)
    monkeypatch.setattr(model_versions, "get_version", lambda *_: version)
    monkeypatch.setattr(model_versions, "list_versions", lambda *_: [version])
    monkeypatch.setattr(registry_history, "read", lambda *_: [sealed, pending])
    monkeypatch.setattr(promotion_checks, "list_objections", list_objections)
    assert servable_versions.list_serving_objections("helper", "1", "champion") == []
    assert required[0].was_promoted is (not change)
    edited = sealed.model_copy(update={"kind": "promote", **MOVE})
    monkeypatch.setattr(registry_history, "read", lambda *_: [edited])
    servable_versions.list_serving_objections("helper", "1", "champion")
    assert required[1].was_promoted is False


@pytest.mark.parametrize(
    ("objection", "remedy"),
    [
        (
            "its evaluation compared it with no model, and the champion is model 1",
            "Evaluate the version again, against",
        ),
        ("its evaluation compared it with base model 1; the model was tuned from 2", "Evaluate the model again"),
        (
            "2 earlier candidates failed on its test split, so its rules must hold",
            "Add new test rows, and run again",
        ),
        ("the model was trained on 2 of its evaluated rows: row 1 equals", "Remove the rows from the evaluation set"),
        (
            "the dataset 1 of its lineage is not in the artifact store, so its evaluated rows cannot",
            "Mount the artifact",
        ),
        ("its model cannot be verified (model.bin is missing)", "Promote where the artifact store is mounted"),
        (
            "its evaluation used dataset 1; the model was trained on 2",
            "Evaluate the model with its training dataset",
        ),
        (
            "the configuration requires a rule as strict as metric: a",
            "Evaluate the model again with this configuration",
        ),
        (
            "policy entry 3 requires task a; its evaluation does not include this task",
            "Evaluate the model again with a configuration that",
        ),
        (
            "the regression suite (policy entry 3) requires task suite_harmful; its evaluation does not include this "
            "task",
            "Evaluate the model with evaluation.suite: default",
        ),
        (
            "policy entry 3 allows evaluations of at most 3 days; its",
            "Evaluate the model again with a higher evaluation.repetition",
        ),
        ("policy entry 3 allows the licences mit; the base model has a", "Tune a base model with an allowed licence"),
        ("entry 2 of the history was edited, so the age of its evaluation is unknown", "Correct the clock"),
        ("its evaluation measured a on 4 items; the configuration requires 5", "Evaluate the model again with this"),
        (evidence.EARLIER_EVALUATION, "Evaluate and package the model again"),
        ("a rule on held_out.loss holds in its evaluation, but the gain is -1.0000", "Evaluate the model again"),
        ("its evaluation's verdict is refused", "Promote an accepted and proven version"),
    ],
)
def test_hint_of_a_refused_promotion_depends_on_the_objection(objection: str, remedy: str) -> None:
    version: Any = SimpleNamespace(name="helper", version="1")
    with pytest.raises(RegistryError) as refused:
        promotion._check_objections(version, [objection], force=False, reason="")
    assert refused.value.hint.startswith(remedy)
    assert refused.value.hint.endswith(", or force the promotion with --force --reason TEXT.")
