"""Triton's request metrics match docs/how-to/monitoring.md and its alerts."""

from __future__ import annotations

import re
import time

import pytest
from tritonclient.utils import InferenceServerException

from components.triton_packaging.triton_server import Server
from tests.docs.test_alerts import METRICS
from tests.triton_packaging.triton_clients import get_metrics, infer_grpc

pytestmark = pytest.mark.triton
LINE = re.compile(r"^(nv_\w+)\{(.*)\} (\S+)$", re.MULTILINE)


def read_metrics(server: Server) -> dict[tuple[str, str], float]:
    """Return the values by metric and sorted labels."""
    found = LINE.findall(get_metrics(server))
    return {(name, ",".join(sorted(labels.split(",")))): float(value) for name, labels, value in found}


def test_alert_metrics_exist_with_their_labels(server: Server) -> None:
    metrics = read_metrics(server)
    expected = {name: labels - {"namespace", "pod"} for name, labels in METRICS.items() if name.startswith("nv_")}
    assert expected
    for name, labels in expected.items():
        label_sets = [set(re.findall(r'(\w+)="', text)) for metric, text in metrics if metric == name]
        assert label_sets
        assert all(label_set == labels for label_set in label_sets)


def test_request_rejected_by_the_model_counts_as_success(server: Server) -> None:
    model, before = server.models[0], read_metrics(server)
    with pytest.raises(InferenceServerException, match="max_tokens is -3"):
        infer_grpc(server, model, text_input="Hello", max_tokens=-3)
    increase = wait_for_increase(server, model, before)
    assert [increase["nv_inference_request_success"], increase.get("nv_inference_request_failure", 0.0)] == [1.0, 0.0]


def wait_for_increase(server: Server, model: str, before: dict[tuple[str, str], float]) -> dict[str, float]:
    """Wait until the model's request counts increase and return the increase. Triton answers before it counts."""
    deadline = time.monotonic() + 30
    while True:
        increase: dict[str, float] = {}
        for (name, labels), value in read_metrics(server).items():
            if f'model="{model}"' in labels and name in (
                "nv_inference_request_success",
                "nv_inference_request_failure",
            ):
                increase[name] = increase.get(name, 0.0) + value - before.get((name, labels), 0.0)
        if any(increase.values()) or time.monotonic() > deadline:
            return increase
        time.sleep(0.1)
