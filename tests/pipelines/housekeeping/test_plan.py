"""What may go, of random things that need one another."""

from __future__ import annotations

from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from pipelines.housekeeping.plan import DAY, KINDS, Kind, Policy, Root, Thing, days, plan

NAMES = [f"t{n}" for n in range(12)]
things = st.builds(
    Thing,
    kind=st.sampled_from(get_args(Kind)),
    name=st.sampled_from(NAMES),
    path=st.just("/somewhere"),
    bytes=st.integers(0, 10),
    unused=st.floats(0, 60 * DAY),
    needs=st.lists(st.sampled_from(NAMES), max_size=3).map(tuple),
    stays=st.sampled_from(["", "", "", "it is running"]),
)
worlds = st.lists(things, max_size=12, unique_by=lambda thing: thing.name)
roots = st.lists(st.builds(Root, name=st.sampled_from(NAMES), why=st.just("an alias")), max_size=3)
policies = st.builds(Policy, older_than=st.floats(DAY, 50 * DAY), kinds=st.sets(st.sampled_from(get_args(Kind))))


def closure(start: set[str], world: list[Thing]) -> set[str]:
    """What these names need, by going over everything until nothing is added."""
    found = set(start)
    while more := {name for thing in world if thing.name in found for name in thing.needs} - found:
        found |= more
    return found


@given(worlds, roots, policies)
def test_what_a_root_reaches_stays_and_what_nothing_reaches_goes(world: list[Thing], needed: list[Root], policy: Policy) -> None:
    decided = plan(world, needed, policy)
    own = {t.name for t in world if t.stays or t.unused < policy.older_than or t.kind not in policy.kinds}
    stays = closure({root.name for root in needed} | own, world)
    assert decided.names == {thing.name for thing in world} - stays
    assert {item.thing.name for item in decided.kept} == {thing.name for thing in world} & stays
    assert all(item.reason for item in [*decided.going, *decided.kept])


@given(worlds, roots, policies)
def test_whenever_the_removal_ends_what_is_left_still_has_what_it_needs(world: list[Thing], needed: list[Root], policy: Policy) -> None:
    acyclic = [Thing(t.kind, t.name, t.path, t.bytes, t.unused, tuple(n for n in t.needs if n < t.name), t.stays) for t in world]
    gone: set[str] = set()
    for item in plan(acyclic, needed, policy).going:
        gone.add(item.thing.name)
        assert all(not gone & set(thing.needs) for thing in acyclic if thing.name not in gone)


def test_an_alias_is_told_as_the_reason_before_the_youth_of_what_needs_it() -> None:
    data, model = Thing("artifact", "data", "/d", 1, 40 * DAY), Thing("artifact", "model", "/m", 1, 0.0, ("data",))
    decided = plan([data, model], [Root("model", "helper version 3 is champion")], Policy(30 * DAY))
    assert {item.thing.name: item.reason for item in decided.kept} == dict.fromkeys(("data", "model"), "helper version 3 is champion")


def test_base_models_go_only_when_they_are_asked_for() -> None:
    base = Thing("base_model", "base", "/b", 1, 400 * DAY)
    assert plan([base], [], Policy(30 * DAY)).names == set()
    assert plan([base], [], Policy(30 * DAY, (*KINDS, "base_model"))).names == {"base"}


def test_things_that_need_one_another_in_a_circle_go_together() -> None:
    ring = [Thing("artifact", a, "/", 1, 40 * DAY, (b,)) for a, b in (("a", "b"), ("b", "a"))]
    assert plan(ring, [], Policy(30 * DAY)).names == {"a", "b"}
    assert plan(ring, [Root("a", "an alias")], Policy(30 * DAY)).names == set()


def test_an_age_is_told_in_hours_then_in_days() -> None:
    assert (days(7200), days(30 * DAY)) == ("2 h", "30 days")
