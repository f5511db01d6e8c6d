"""What a run says of its verdict and of the aliases, from what the registry said."""

from __future__ import annotations

from pipelines import outcome, sizing
from pipelines.stages import CONDITIONAL, MAKERS, STAGES


def test_a_model_that_was_the_champion_when_it_was_registered_is_unchanged() -> None:
    assert outcome.verdict("accepted", {"aliases": ["challenger", "champion"]}) == "unchanged"
    assert outcome.verdict("accepted", {"aliases": ["challenger"]}) == "accepted"
    assert outcome.verdict("refused", {}) == "refused"


def test_the_aliases_are_those_registered_with_and_the_one_that_was_moved() -> None:
    assert outcome.aliases({"aliases": ["challenger"]}, {"alias": "champion"}) == ["challenger", "champion"]
    assert outcome.aliases({"aliases": ["candidate"]}, None) == ["candidate"]
    assert outcome.aliases({}, {}) == []


def test_every_step_has_a_measured_time_to_start_and_every_maker_is_a_step() -> None:
    assert set(sizing.START) == {"run", *STAGES}
    assert {*MAKERS.values(), *CONDITIONAL} <= set(STAGES)
