"""The algorithm of Kubernetes' HorizontalPodAutoscaler, configured by a rendered manifest, and a service that it scales.

https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/#algorithm-details; pods without a metric count as idle when the
autoscaler adds pods, and as on target when it removes pods. KEDA makes a HorizontalPodAutoscaler with one External metric per trigger.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Json = dict[str, Any]
SYNC_SECONDS = 15  # --horizontal-pod-autoscaler-sync-period
TOLERANCE = 0.1  # --horizontal-pod-autoscaler-tolerance
SAMPLES = 4  # syncs in the minute of avg_over_time in docs/examples/prometheus-adapter.yaml and the KEDA triggers
RECORDED = Path(__file__).with_name("recorded_load.json")


@dataclass
class Autoscaler:
    """State and settings of an autoscaler.

    Attributes:
        targets: target per pod by metric.
        is_external: whether a metric is one number for all pods (KEDA) instead of one per pod.
        recommendations: time and desired replicas of each sync.
        changes: time and difference of each change.
    """

    minimum: int
    maximum: int
    behavior: Json
    targets: dict[str, float]
    is_external: bool
    recommendations: list[tuple[float, int]] = field(default_factory=list)
    changes: list[tuple[float, int]] = field(default_factory=list)

    def sync(self, now: float, replicas: int, values: Mapping[str, Sequence[float]]) -> int:
        """Return the new number of replicas.

        Args:
            now: time in seconds.
            replicas: current number of pods.
            values: by metric, the value of each pod that has one.
        """
        desired = max(self._compute_desired(name, replicas, values[name]) for name in self.targets)
        if not self.recommendations:
            self.recommendations.append((now, replicas))  # as the controller does when it starts
        self.recommendations.append((now, desired))
        lowest = min(self._recent_recommendations(now, "scaleUp", 0))
        highest = max(self._recent_recommendations(now, "scaleDown", 300))
        stabilized = max(replicas, lowest) if lowest > replicas else min(replicas, highest)
        limited = min(max(self._limit(now, replicas, stabilized), self.minimum), self.maximum)
        if limited != replicas:
            self.changes.append((now, limited - replicas))
        return limited

    def _compute_desired(self, name: str, replicas: int, values: Sequence[float]) -> int:
        target = self.targets[name]
        if not values:
            return replicas
        if self.is_external:
            ratio = sum(values) / (target * replicas)
            return replicas if abs(ratio - 1) <= TOLERANCE else math.ceil(sum(values) / target)
        ratio = sum(values) / len(values) / target
        missing = replicas - len(values)
        if not missing:
            return replicas if abs(ratio - 1) <= TOLERANCE else math.ceil(ratio * replicas)
        assumed = (sum(values) + missing * (target if ratio < 1 else 0.0)) / replicas / target
        desired = math.ceil(assumed * replicas)
        changes_direction = (ratio - 1) * (assumed - 1) < 0 or (assumed - 1) * (desired - replicas) < 0
        return replicas if abs(assumed - 1) <= TOLERANCE or changes_direction else desired

    def _recent_recommendations(self, now: float, direction: str, default_seconds: int) -> list[int]:
        seconds = self.behavior.get(direction, {}).get("stabilizationWindowSeconds", default_seconds)
        return [desired for time, desired in self.recommendations if time >= now - seconds]

    def _limit(self, now: float, replicas: int, desired: int) -> int:
        if desired == replicas:
            return replicas
        direction = "scaleUp" if desired > replicas else "scaleDown"
        limits = []
        for policy in self.behavior[direction]["policies"]:
            assert policy["type"] == "Pods"
            recent = sum(change for time, change in self.changes if time > now - policy["periodSeconds"])
            start = replicas - recent
            limits.append(start + policy["value"] if desired > replicas else start - policy["value"])
        return min(desired, max(limits)) if desired > replicas else max(desired, min(limits))


def read_autoscaler(manifest: Json) -> Autoscaler:
    """Return the autoscaler of a HorizontalPodAutoscaler with Pods metrics, or of a ScaledObject."""
    spec = manifest["spec"]
    if manifest["kind"] == "ScaledObject":
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        targets = {trigger["name"]: float(trigger["metadata"]["threshold"]) for trigger in spec["triggers"]}
        return Autoscaler(spec["minReplicaCount"], spec["maxReplicaCount"], behavior, targets, is_external=True)
    names = {
        "tuneline_gateway_utilization": "utilization",
        "tuneline_gateway_completion_tokens_per_second": "tokens",
    }
    targets = {}
    for metric in spec["metrics"]:
        quantity = metric["pods"]["target"]["averageValue"]
        value = float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)
        targets[names[metric["pods"]["metric"]["name"]]] = value
    return Autoscaler(spec["minReplicas"], spec["maxReplicas"], spec["behavior"], targets, is_external=False)


@dataclass(frozen=True)
class RecordedLoad:
    """Metrics of one pod by number of clients, as benchmarks/autoscaling.py recorded them."""

    clients: list[int]
    utilization: list[list[float]]
    tokens: list[float]
    rejected: list[float]

    def read_utilization(self, clients: float, index: int) -> float:
        """Return running requests over slots in the scrape `index`, interpolated between the recorded loads."""
        series = [values[index % len(values)] for values in self.utilization]
        return interpolate(clients, [0, *self.clients], [0.0, *series])

    def read_tokens(self, clients: float) -> float:
        """Return the generated tokens per second."""
        return interpolate(clients, [0, *self.clients], [0.0, *self.tokens])


def load_recording() -> RecordedLoad:
    """Read the recorded load."""
    steps = json.loads(RECORDED.read_text(encoding="utf-8"))["steps"]

    def rate(step: Json, name: str) -> float:
        first, last = step["scrapes"][0], step["scrapes"][-1]
        return float((last.get(name, 0) - first.get(name, 0)) / (last["seconds"] - first["seconds"]))

    return RecordedLoad(
        clients=[step["clients"] for step in steps],
        utilization=[[scrape["running"] / scrape["slots"] for scrape in step["scrapes"]] for step in steps],
        tokens=[rate(step, "completion_tokens") for step in steps],
        rejected=[rate(step, "status_429") for step in steps],
    )


def interpolate(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Interpolate linearly; outside of the range return the nearest value."""
    if x >= xs[-1]:
        return ys[-1]
    index = max(i for i, left in enumerate(xs) if left <= x)
    share = (x - xs[index]) / (xs[index + 1] - xs[index])
    return ys[index] + share * (ys[index + 1] - ys[index])


@dataclass
class Pod:
    """A pod with its utilization at each sync since it was ready."""

    ready_at: float
    utilization: list[float] = field(default_factory=list)


def simulate(
    autoscaler: Autoscaler, clients: Callable[[float], float], seconds: int, start_seconds: int
) -> list[tuple[int, int]]:
    """Return time and replicas at each sync, from the autoscaler's minimum.

    Args:
        autoscaler: the autoscaler under test.
        clients: number of clients of all pods together, by time.
        seconds: length of the simulation.
        start_seconds: time until a new pod is ready.
    """
    recording = load_recording()
    pods = [Pod(0.0) for _ in range(autoscaler.minimum)]
    replicas: list[tuple[int, int]] = []
    for index, now in enumerate(range(0, seconds, SYNC_SECONDS)):
        ready = [pod for pod in pods if pod.ready_at <= now]
        share = clients(now) / len(ready)
        for pod in ready:
            pod.utilization.append(recording.read_utilization(share, index))
        values = {
            "utilization": [statistics.fmean(pod.utilization[-SAMPLES:]) for pod in ready],
            "tokens": [recording.read_tokens(share)] * len(ready),
        }
        number = autoscaler.sync(now, len(pods), values)
        pods = pods[:number] + [Pod(now + start_seconds) for _ in range(number - len(pods))]
        replicas.append((now, number))
    return replicas
