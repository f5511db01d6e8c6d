"""The retention plan of random items with references."""

from __future__ import annotations

from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from pipelines.operations.garbage_collection.retention_plan import (
    DAY_SECONDS,
    DEFAULT_KINDS,
    Kind,
    RetentionPolicy,
    Root,
    StoredItem,
    build_plan,
    format_age,
)

NAMES = [f"t{n}" for n in range(12)]
stored_items = st.builds(
    StoredItem,
    kind=st.sampled_from(get_args(Kind)),
    name=st.sampled_from(NAMES),
    path=st.just("/somewhere"),
    bytes=st.integers(0, 10),
    unused=st.floats(0, 60 * DAY_SECONDS),
    references=st.lists(st.sampled_from(NAMES), max_size=3).map(tuple),
    keep_reason=st.sampled_from(["", "", "", "the run is active"]),
)
item_lists = st.lists(stored_items, max_size=12, unique_by=lambda stored: stored.name)
roots = st.lists(st.builds(Root, name=st.sampled_from(NAMES), reason=st.just("an alias")), max_size=3)
policies = st.builds(
    RetentionPolicy, older_than=st.floats(DAY_SECONDS, 50 * DAY_SECONDS), kinds=st.sets(st.sampled_from(get_args(Kind)))
)


def find_reachable_names(start: set[str], items: list[StoredItem]) -> set[str]:
    """Return the names that these reference, by repeated passes over all items."""
    names = set(start)
    while more := {name for stored in items if stored.name in names for name in stored.references} - names:
        names |= more
    return names


@given(item_lists, roots, policies)
def test_reachable_items_are_kept_and_the_others_deleted(
    items: list[StoredItem], item_roots: list[Root], policy: RetentionPolicy
) -> None:
    plan = build_plan(items, item_roots, policy)
    retained = {
        stored.name
        for stored in items
        if stored.keep_reason or stored.unused < policy.older_than or stored.kind not in policy.kinds
    }
    kept_names = find_reachable_names({root.name for root in item_roots} | retained, items)
    assert plan.names == {stored.name for stored in items} - kept_names
    assert {item.item.name for item in plan.kept} == {stored.name for stored in items} & kept_names
    assert all(item.reason for item in [*plan.to_delete, *plan.kept])


@given(item_lists, roots, policies)
def test_interrupted_deletion_leaves_no_dangling_reference(
    items: list[StoredItem], item_roots: list[Root], policy: RetentionPolicy
) -> None:
    acyclic = [
        StoredItem(
            stored.kind,
            stored.name,
            stored.path,
            stored.bytes,
            stored.unused,
            tuple(n for n in stored.references if n < stored.name),
            stored.keep_reason,
        )
        for stored in items
    ]
    deleted: set[str] = set()
    for item in build_plan(acyclic, item_roots, policy).to_delete:
        deleted.add(item.item.name)
        assert all(not deleted & set(stored.references) for stored in acyclic if stored.name not in deleted)


def test_alias_is_reported_rather_than_the_age_of_a_dependent() -> None:
    data, model = (
        StoredItem("artifact", "data", "/d", 1, 40 * DAY_SECONDS),
        StoredItem("artifact", "model", "/m", 1, 0.0, ("data",)),
    )
    plan = build_plan([data, model], [Root("model", "helper version 3 is champion")], RetentionPolicy(30 * DAY_SECONDS))
    assert {item.item.name: item.reason for item in plan.kept} == dict.fromkeys(
        ("data", "model"), "helper version 3 is champion"
    )


def test_base_models_are_deleted_only_on_request() -> None:
    base = StoredItem("base_model", "base", "/b", 1, 400 * DAY_SECONDS)
    assert build_plan([base], [], RetentionPolicy(30 * DAY_SECONDS)).names == set()
    assert build_plan([base], [], RetentionPolicy(30 * DAY_SECONDS, (*DEFAULT_KINDS, "base_model"))).names == {"base"}


def test_items_in_a_reference_cycle_are_deleted_together() -> None:
    cycle = [StoredItem("artifact", a, "/", 1, 40 * DAY_SECONDS, (b,)) for a, b in (("a", "b"), ("b", "a"))]
    assert build_plan(cycle, [], RetentionPolicy(30 * DAY_SECONDS)).names == {"a", "b"}
    assert build_plan(cycle, [Root("a", "an alias")], RetentionPolicy(30 * DAY_SECONDS)).names == set()


def test_age_is_formatted_in_hours_then_in_days() -> None:
    assert (format_age(7200), format_age(30 * DAY_SECONDS)) == ("2 h", "30 days")
