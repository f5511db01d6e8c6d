"""The Grafana dashboard: expressions parse, and use metrics and labels that exist. No Grafana has shown it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.deploy.rendering import DEPLOY, render_with_optional, select_kind
from tests.docs.test_alerts import METRICS, parse_selectors

Json = dict[str, Any]
DASHBOARD: Json = json.loads((DEPLOY / "components" / "serving-dashboard" / "gateway.json").read_text(encoding="utf-8"))
TARGETS: list[Json] = [target for panel in DASHBOARD["panels"] for target in panel["targets"]]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}


def read_selectors(expression: str) -> list[tuple[str, dict[str, str]]]:
    """Return the metrics of an expression with their matchers; a range that Grafana sets is a minute."""
    return parse_selectors(expression.replace("$__rate_interval", "1m"))


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target["legendFormat"])
def test_expression_parses_and_its_labels_exist(target: Json) -> None:
    selectors = read_selectors(target["expr"])
    assert selectors
    for name, matchers in selectors:
        assert set(matchers) <= METRICS[name]
        assert matchers["namespace"] == "$namespace"
    grouped = {label.strip() for labels in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in labels.split(",")}
    assert all(grouped <= METRICS[name] for name, _ in selectors)
    assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= grouped


def test_dashboard_shows_every_metric_of_the_gateway() -> None:
    shown = {name for target in TARGETS for name, _ in read_selectors(target["expr"])}
    histogram_parts = re.compile(r"_seconds_(count|sum)$")
    gateway = {name for name in METRICS if name.startswith("tuneline_") and not histogram_parts.search(name)}
    assert gateway <= shown


def test_variables_and_panels_are_consistent() -> None:
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps([DASHBOARD["panels"], DASHBOARD["templating"]])))
    assert used == set(VARIABLES)
    for name in ("namespace", "model"):
        match = re.fullmatch(r"label_values\((.*), (\w+)\)", VARIABLES[name]["query"])
        assert match
        ((metric, matchers),) = read_selectors(match[1])
        assert {match[2], *matchers} <= METRICS[metric]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]}
    assert len(set(ids)) == len(places) == len(ids)


def test_config_map_has_the_dashboard_and_the_label_of_the_sidecar() -> None:
    maps = select_kind(render_with_optional("xe9680-powerscale"), "ConfigMap", "monitoring")
    manifest = maps["tuneline-gateway-dashboard"]
    assert manifest["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(manifest["data"]["gateway.json"]) == DASHBOARD
