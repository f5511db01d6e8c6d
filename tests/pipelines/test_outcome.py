"""Verdict and aliases of a run, from the response of the registry."""

from __future__ import annotations

from components.common.pipeline_step import STAGE_BY_ARTIFACT
from pipelines.planning import machine_speed
from pipelines.steps import registry_outcome
from pipelines.steps.stage_names import CONDITIONAL_STAGES, STAGE_LABELS


def test_champion_at_registration_is_unchanged() -> None:
    assert registry_outcome.determine_verdict("accepted", {"aliases": ["challenger", "champion"]}) == "unchanged"
    assert registry_outcome.determine_verdict("accepted", {"aliases": ["challenger"]}) == "accepted"
    assert registry_outcome.determine_verdict("refused", {}) == "refused"


def test_aliases_include_the_moved_one() -> None:
    assert registry_outcome.list_aliases({"aliases": ["challenger"]}, {"alias": "champion"}) == [
        "challenger",
        "champion",
    ]
    assert registry_outcome.list_aliases({"aliases": ["candidate"]}, None) == ["candidate"]
    assert registry_outcome.list_aliases({}, {}) == []


def test_every_step_has_a_start_time() -> None:
    assert set(machine_speed.START_SECONDS) == {"run", *STAGE_LABELS}
    assert {*STAGE_BY_ARTIFACT.values(), *CONDITIONAL_STAGES} <= set(STAGE_LABELS)
