"""deploy/components/alerts/alerts.yaml: fields of the Prometheus operator, valid expressions, existing metrics and object names.

No Prometheus runs here. tests/triton_packaging/test_metrics.py compares the Triton metrics with a running server, and
tests/pipelines/gateway/test_telemetry.py those of the gateway with a running gateway.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.deploy.rendering import OVERLAYS, iterate_pods, render_overlay, render_with_optional, select_kind
from tests.pipelines.command import ROOT

Json = dict[str, Any]
FILE = ROOT / "deploy" / "components" / "alerts" / "alerts.yaml"
DURATION = re.compile(r"(\d+[smhd])+")
STATE = {"namespace"}
TRITON = {"namespace", "pod", "model", "version"}
CLAIM = {"namespace", "persistentvolumeclaim"}
POD = {"namespace", "pod"}
SERVED = POD | {"model", "version"}
CLIENT = SERVED | {"key"}
METRICS = {
    # Triton, docs/user_guide/metrics.md; namespace and pod come from the PodMonitor
    "nv_inference_request_success": TRITON,
    "nv_inference_request_failure": TRITON | {"reason"},
    "nv_inference_request_duration_us": TRITON,
    # the gateway, pipelines/gateway/telemetry.py; namespace and pod come from the PodMonitor
    "tuneline_gateway_requests_total": CLIENT | {"endpoint", "status"},
    **{
        f"tuneline_gateway_{name}_seconds_{part}": CLIENT | ({"le"} if part == "bucket" else set())
        for name in ("request", "time_to_first_token", "inter_token")
        for part in ("bucket", "count", "sum")
    },
    "tuneline_gateway_prompt_tokens_total": CLIENT,
    "tuneline_gateway_completion_tokens_total": CLIENT,
    "tuneline_gateway_running_requests": POD,
    "tuneline_gateway_draining": POD,
    "tuneline_gateway_ready_models": POD,
    "tuneline_gateway_slots": SERVED,
    # kubernetes/kube-state-metrics, docs/metrics/workload: stable metrics
    "kube_deployment_status_replicas_available": STATE | {"deployment"},
    "kube_deployment_spec_replicas": STATE | {"deployment"},
    "kube_pod_container_status_restarts_total": STATE | {"pod", "container", "uid"},
    "kube_pod_status_phase": STATE | {"pod", "phase", "uid"},
    "kube_job_status_failed": STATE | {"job_name", "reason"},
    "kube_job_created": STATE | {"job_name"},
    "kube_cronjob_status_last_successful_time": STATE | {"cronjob"},
    "kube_cronjob_created": STATE | {"cronjob"},
    # kubernetes, pkg/kubelet/metrics/collectors/volume_stats.go
    "kubelet_volume_stats_available_bytes": CLAIM,
    "kubelet_volume_stats_capacity_bytes": CLAIM,
    "kubelet_volume_stats_inodes_free": CLAIM,
    "kubelet_volume_stats_inodes": CLAIM,
    # kubernetes-sigs/kueue, pkg/metrics/metrics.go
    "kueue_pending_workloads": {"cluster_queue", "status"},
    "kueue_cluster_queue_status": {"cluster_queue", "status"},
}


def load_groups() -> list[Json]:
    manifest = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    assert (manifest["apiVersion"], manifest["kind"], set(manifest["spec"])) == (
        "monitoring.coreos.com/v1",
        "PrometheusRule",
        {"groups"},
    )
    return list(manifest["spec"]["groups"])


RULES = [rule for group in load_groups() for rule in group["rules"]]
each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])


def parse_selectors(expression: str) -> list[tuple[str, dict[str, str]]]:
    """Return the metrics of an expression with their label matchers; raise ValueError if Prometheus would not parse it."""
    import promql_parser

    parsed: list[tuple[str, dict[str, str]]] = []

    def visit(node: Any) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            parsed.append((node.name, {matcher.name: matcher.value for matcher in node.matchers.matchers}))
        return True

    promql_parser.walk(promql_parser.parse(expression), visit)
    return parsed


def collect_label_values(label: str) -> set[str]:
    """Return the values that the alerts match a label against, with alternatives split."""
    values = [matchers[label] for rule in RULES for _, matchers in parse_selectors(rule["expr"]) if label in matchers]
    return {value for pattern in values for value in pattern.split("|")}


def collect_names(kind: str) -> set[str]:
    """Return the names of a kind's objects in all overlays."""
    return {name for overlay in OVERLAYS for name in select_kind(render_overlay(overlay), kind)}


def test_rules_have_only_prometheusrule_fields() -> None:
    # prometheus-operator, example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml
    assert all(set(group) == {"name", "rules"} for group in load_groups())
    for rule in RULES:
        assert (
            {"alert", "expr", "labels", "annotations"} <= set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        )
        assert DURATION.fullmatch(rule.get("for", "1m"))
        assert rule["labels"]["severity"] in ("page", "ticket")
    assert len({rule["alert"] for rule in RULES}) == len(RULES)


def test_config_map_has_the_rules_as_a_rule_file() -> None:
    config_map = select_kind(render_with_optional("xe9680-powerscale"), "ConfigMap", "monitoring")["tuneline-alerts"]
    assert yaml.safe_load(config_map["data"]["tuneline.yaml"]) == {"groups": load_groups()}


@each_rule
def test_expression_parses_and_its_labels_exist(rule: Json) -> None:
    selectors = parse_selectors(rule["expr"])
    assert selectors
    for name, matchers in selectors:
        assert set(matchers) <= METRICS[name]
    summary_labels = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    assert summary_labels <= set().union(*(METRICS[name] for name, _ in selectors))


def test_invalid_expressions_are_rejected() -> None:
    for broken in ("sum(rate(nv_inference_request_success[5m]) > 0", "rate(nv_inference_request_success) > 0"):
        with pytest.raises(ValueError, match=r"unclosed|expected type"):
            parse_selectors(broken)
    assert parse_selectors('rate(a{b="c"}[5m]) > 0 unless d offset 1h') == [("a", {"b": "c"}), ("d", {})]


def test_alerts_name_objects_of_the_overlays() -> None:
    assert collect_label_values("deployment") <= collect_names("Deployment")
    jobs = {f"{name}-.+" for name in collect_names("CronJob")}
    assert collect_label_values("job_name") <= jobs
    assert {
        *collect_label_values("cronjob"),
        *(name.removesuffix("-.+") for name in collect_label_values("job_name")),
    } == collect_names("CronJob")
    stateful_sets = [
        stateful_set
        for overlay in OVERLAYS
        for stateful_set in select_kind(render_overlay(overlay), "StatefulSet").values()
    ]
    replica_claims = {
        f"{claim['metadata']['name']}-{stateful_set['metadata']['name']}-0"
        for stateful_set in stateful_sets
        for claim in stateful_set["spec"]["volumeClaimTemplates"]
    }
    assert collect_label_values("persistentvolumeclaim") <= collect_names("PersistentVolumeClaim") | replica_claims
    containers = {
        container["name"]
        for overlay in OVERLAYS
        for pod in iterate_pods(render_overlay(overlay))
        for container in pod["spec"]["containers"]
    }
    assert collect_label_values("container") <= containers
    assert all(
        any(re.fullmatch(value, name) for name in collect_names("Namespace"))
        for value in collect_label_values("namespace")
    )


def test_page_lists_exactly_the_alerts() -> None:
    page = (ROOT / "docs" / "how-to" / "monitoring.md").read_text(encoding="utf-8")
    table = page.partition("## Metrics")[2].partition("\n## ")[0]
    cells = [line.split("|")[3] for line in table.splitlines() if line.startswith("| ")][1:]
    assert sorted(name for cell in cells for name in re.findall(r"`(\w+)`", cell)) == sorted(
        rule["alert"] for rule in RULES
    )
