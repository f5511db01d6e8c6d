"""Objections to a promotion while the move of the alias is not closed yet."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from components.model_registry import (
    model_versions,
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
