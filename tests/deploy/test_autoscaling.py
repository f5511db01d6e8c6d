"""The autoscalers of the overlays under recorded load, by simulation, and the metrics that they read.

The recording is of a real Triton and gateway (benchmarks/autoscaling.py). No Kubernetes runs here.
"""

from __future__ import annotations

import itertools
import re
import statistics
from typing import Any

import pytest
import yaml

from tests.deploy.autoscaler import (
    SYNC_SECONDS,
    Autoscaler,
    load_recording,
    read_autoscaler,
    simulate,
)
from tests.deploy.rendering import OVERLAYS, render_overlay, render_with_optional, select_kind
from tests.docs.test_alerts import METRICS, parse_selectors
from tests.pipelines.command import ROOT

Json = dict[str, Any]
ADAPTER = ROOT / "docs" / "examples" / "prometheus-adapter.yaml"
START_SECONDS = 240  # to copy and load a package
OVERLAYS_BY_KIND = {"HorizontalPodAutoscaler": "xe9680-powerscale", "ScaledObject": "gaudi3-roce"}
each_kind = pytest.mark.parametrize("kind", OVERLAYS_BY_KIND)


def load_autoscaler(kind: str) -> Autoscaler:
    (manifest,) = select_kind(render_with_optional(OVERLAYS_BY_KIND[kind]), kind).values()
    return read_autoscaler(manifest)


def list_changes(replicas: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return time and number of replicas of each change."""
    return [after for before, after in itertools.pairwise(replicas) if before[1] != after[1]]


def test_recorded_load_rises_to_the_full_queue() -> None:
    recording = load_recording()
    means = [statistics.fmean(values) for values in recording.utilization]
    assert means[0] < 0.2
    full = recording.clients.index(24)  # 8 slots and 16 queue positions
    assert means[: full + 1] == sorted(means[: full + 1])
    assert means[full] == pytest.approx(3, abs=0.1)
    assert max(map(max, recording.utilization)) <= 3
    assert recording.rejected[0] == 0
    assert recording.rejected[-1] > 0
    assert max(recording.tokens) > 2 * recording.tokens[0]


@each_kind
def test_low_load_keeps_the_minimum(kind: str) -> None:
    replicas = simulate(load_autoscaler(kind), lambda now: 6, 7200, START_SECONDS)
    assert {number for _, number in replicas} == {2}


@each_kind
def test_high_load_scales_out_at_once_and_in_after_the_window(kind: str) -> None:
    began, ended = 600, 4200
    replicas = simulate(load_autoscaler(kind), lambda now: 60 if began <= now < ended else 6, 9000, START_SECONDS)
    changes = list_changes(replicas)
    assert [number for _, number in changes] == [3, 4, 3, 2]
    (third, _), (fourth, _), (first_removal, _), (second_removal, _) = changes
    assert 90 <= third - began <= 90 + 2 * SYNC_SECONDS
    assert 120 <= fourth - third <= 120 + START_SECONDS
    assert 900 <= first_removal - ended <= 900 + 60 + 2 * SYNC_SECONDS
    assert 300 <= second_removal - first_removal <= 300 + 2 * SYNC_SECONDS


@each_kind
def test_load_at_the_target_does_not_flap(kind: str) -> None:
    # 19 clients on three pods of 8 slots: utilization 0.79 of a target of 0.8.
    changes = list_changes(simulate(load_autoscaler(kind), lambda now: 19, 7200, START_SECONDS))
    assert [number for _, number in changes] == [3]


@each_kind
def test_alternating_load_does_not_flap(kind: str) -> None:
    replicas = simulate(load_autoscaler(kind), lambda now: 24 if now // 300 % 2 else 8, 14400, START_SECONDS)
    numbers = [number for _, number in list_changes(replicas)]
    assert numbers
    assert numbers == sorted(numbers)


@each_kind
def test_token_target_scales_out_where_slots_are_free(kind: str) -> None:
    autoscaler = load_autoscaler(kind)
    recording = load_recording()
    autoscaler.targets = {"utilization": 100.0, "tokens": 0.4 * max(recording.tokens)}
    replicas = simulate(autoscaler, lambda now: 16, 3600, START_SECONDS)
    assert replicas[-1][1] > 2


def test_without_metrics_the_number_of_pods_stays() -> None:
    autoscaler = load_autoscaler("HorizontalPodAutoscaler")
    assert autoscaler.sync(0, 3, {"utilization": [], "tokens": []}) == 3


def test_policies_and_windows_limit_a_change() -> None:
    policies = {"policies": [{"type": "Pods", "value": 2, "periodSeconds": 60}]}
    behavior = {
        "scaleUp": {"stabilizationWindowSeconds": 0, **policies},
        "scaleDown": {"stabilizationWindowSeconds": 30, **policies},
    }
    autoscaler = Autoscaler(1, 10, behavior, {"x": 1.0}, is_external=False)
    assert autoscaler.sync(0, 1, {"x": [1.0]}) == 1
    assert autoscaler.sync(15, 1, {"x": [9.0]}) == 3
    assert autoscaler.sync(30, 3, {"x": [9.0] * 3}) == 3, "two pods were added in this minute"
    assert autoscaler.sync(75, 3, {"x": [9.0] * 3}) == 5
    assert autoscaler.sync(90, 5, {"x": [0.1] * 5}) == 5, "a high recommendation is in the window"
    assert autoscaler.sync(135, 5, {"x": [0.1] * 5}) == 3
    assert autoscaler.sync(150, 3, {"x": [0.1] * 3}) == 3, "two pods were removed in this minute"
    assert autoscaler.sync(240, 3, {"x": [1.09] * 3}) == 3, "within the tolerance"


# Metrics of the autoscalers


def read_adapter_rules() -> dict[str, str]:
    """Return the query of each metric of the Prometheus adapter, for a pod of team-a."""
    values = yaml.safe_load(ADAPTER.read_text(encoding="utf-8"))
    assert set(values) == {"prometheus", "rules"}
    queries = {}
    for rule in values["rules"]["custom"]:
        assert set(rule) == {"seriesQuery", "resources", "name", "metricsQuery"}
        assert set(rule["resources"]["overrides"]) == {"namespace", "pod"}
        ((series, matchers),) = parse_selectors(rule["seriesQuery"])
        assert set(matchers) == {"namespace", "pod"}
        query = rule["metricsQuery"].replace("<<.Series>>", series)
        query = query.replace("<<.LabelMatchers>>", 'namespace="team-a",pod=~"a|b"').replace("<<.GroupBy>>", "pod")
        assert "<<" not in query
        queries[rule["name"]["as"]] = query
    return queries


def test_adapter_computes_the_metrics_of_the_autoscalers_from_existing_metrics() -> None:
    queries = read_adapter_rules()
    scalers = [
        scaler
        for overlay in OVERLAYS
        for scaler in select_kind(render_overlay(overlay), "HorizontalPodAutoscaler").values()
    ]
    used = {
        metric["pods"]["metric"]["name"]
        for scaler in scalers
        for metric in scaler["spec"]["metrics"]
        if "pods" in metric
    }
    assert used == set(queries)
    for query in queries.values():
        for name, matchers in parse_selectors(query):
            assert set(matchers) <= METRICS[name]


def test_triggers_of_keda_query_the_own_namespace_and_existing_metrics() -> None:
    for overlay in OVERLAYS:
        for scaled in select_kind(render_with_optional(overlay), "ScaledObject").values():
            target = select_kind(render_overlay(overlay), "Deployment", scaled["metadata"]["namespace"])
            assert scaled["spec"]["scaleTargetRef"]["name"] in target
            for trigger in scaled["spec"]["triggers"]:
                assert set(trigger) == {"type", "name", "metricType", "metadata"}
                # kedacore/keda, pkg/scalers/prometheus_scaler.go
                assert set(trigger["metadata"]) == {"serverAddress", "query", "threshold"}
                assert all(isinstance(value, str) for value in trigger["metadata"].values())
                for name, matchers in parse_selectors(trigger["metadata"]["query"]):
                    assert set(matchers) <= METRICS[name]
                    assert matchers["namespace"] == scaled["metadata"]["namespace"]


def test_both_kinds_of_autoscaler_have_the_same_settings() -> None:
    one, other = (load_autoscaler(kind) for kind in OVERLAYS_BY_KIND)
    assert (one.minimum, one.maximum, one.behavior) == (other.minimum, other.maximum, other.behavior)
    assert one.targets == other.targets


def test_page_states_the_formula_of_the_adapter() -> None:
    page = (ROOT / "docs" / "how-to" / "autoscaling.md").read_text(encoding="utf-8")
    for name in read_adapter_rules():
        assert re.search(rf"\| `{name}` \|", page)
