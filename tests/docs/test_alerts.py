"""docs/examples/alerts.yaml: fields that the Prometheus operator has, expressions that Prometheus parses, metrics and names that there are.

No Prometheus runs here. Triton's metrics are compared with a running one in tests/triton_packaging/test_metrics.py.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.deploy.rendering import OVERLAYS, of_kind, pods, rendered
from tests.pipelines.command import ROOT

Json = dict[str, Any]
FILE = ROOT / "docs" / "examples" / "alerts.yaml"
DURATION = re.compile(r"(\d+[smhd])+")
STATE = {"namespace"}
TRITON = {"namespace", "pod", "model", "version"}
CLAIM = {"namespace", "persistentvolumeclaim"}
METRICS = {
    # Triton, docs/user_guide/metrics.md; namespace and pod come from the PodMonitor
    "nv_inference_request_success": TRITON,
    "nv_inference_request_failure": TRITON | {"reason"},
    "nv_inference_request_duration_us": TRITON,
    # kubernetes/kube-state-metrics, docs/metrics/workload: the stable ones
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


def groups() -> list[Json]:
    thing = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    assert (thing["apiVersion"], thing["kind"], set(thing["spec"])) == ("monitoring.coreos.com/v1", "PrometheusRule", {"groups"})
    return list(thing["spec"]["groups"])


RULES = [rule for group in groups() for rule in group["rules"]]
each = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])


def selectors(expression: str) -> list[tuple[str, dict[str, str]]]:
    """The metrics of an expression, with the labels that they are chosen by. Raises ValueError where Prometheus would not parse it."""
    import promql_parser

    found: list[tuple[str, dict[str, str]]] = []

    def visit(part: Any) -> bool:
        if isinstance(part, promql_parser.VectorSelector):
            found.append((part.name, {one.name: one.value for one in part.matchers.matchers}))
        return True

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found


def named(label: str) -> set[str]:
    """The values that the alerts choose a label by, alternatives one by one."""
    values = [chosen[label] for rule in RULES for _, chosen in selectors(rule["expr"]) if label in chosen]
    return {one for value in values for one in value.split("|")}


def made(kind: str) -> set[str]:
    """The names of a kind's objects in all overlays."""
    return {name for overlay in OVERLAYS for name in of_kind(rendered(overlay), kind)}


def test_the_fields_are_those_of_a_prometheusrule() -> None:
    # prometheus-operator, example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml
    assert all(set(group) == {"name", "rules"} for group in groups())
    for rule in RULES:
        assert {"alert", "expr", "labels", "annotations"} <= set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert DURATION.fullmatch(rule.get("for", "1m"))
        assert rule["labels"]["severity"] in ("page", "ticket")
    assert len({rule["alert"] for rule in RULES}) == len(RULES)


@each
def test_prometheus_parses_the_expression_and_its_metrics_have_the_labels(rule: Json) -> None:
    found = selectors(rule["expr"])
    assert found
    for name, chosen in found:
        assert set(chosen) <= METRICS[name]
    told = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    assert told <= set().union(*(METRICS[name] for name, _ in found))


def test_a_broken_expression_and_one_of_the_wrong_type_would_be_found() -> None:
    for broken in ("sum(rate(nv_inference_request_success[5m]) > 0", "rate(nv_inference_request_success) > 0"):
        with pytest.raises(ValueError, match=r"unclosed|expected type"):
            selectors(broken)
    assert selectors('rate(a{b="c"}[5m]) > 0 unless d offset 1h') == [("a", {"b": "c"}), ("d", {})]


def test_what_is_watched_is_what_deploy_makes() -> None:
    assert named("deployment") <= made("Deployment")
    jobs = {f"{name}-.+" for name in made("CronJob")}
    assert named("job_name") <= jobs
    assert {*named("cronjob"), *(name.removesuffix("-.+") for name in named("job_name"))} == made("CronJob")
    stateful = [one for overlay in OVERLAYS for one in of_kind(rendered(overlay), "StatefulSet").values()]
    replicas = {
        f"{claim['metadata']['name']}-{one['metadata']['name']}-0" for one in stateful for claim in one["spec"]["volumeClaimTemplates"]
    }
    assert named("persistentvolumeclaim") <= made("PersistentVolumeClaim") | replicas
    running = {one["name"] for overlay in OVERLAYS for pod in pods(rendered(overlay)) for one in pod["spec"]["containers"]}
    assert named("container") <= running
    assert all(any(re.fullmatch(value, name) for name in made("Namespace")) for value in named("namespace"))


def test_the_page_names_every_alert_and_no_other() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    table = page.partition("## Metrics")[2].partition("\n## ")[0]
    cells = [line.split("|")[3] for line in table.splitlines() if line.startswith("| ")][1:]
    assert sorted(name for cell in cells for name in re.findall(r"`(\w+)`", cell)) == sorted(rule["alert"] for rule in RULES)
