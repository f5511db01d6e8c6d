"""What Triton counts of a package's requests is what docs/monitoring.md and its alerts go by."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request

import pytest

from components.triton_packaging.server import Server
from tests.docs.test_alerts import METRICS

pytestmark = pytest.mark.triton
LINE = re.compile(r"^(nv_\w+)\{(.*)\} (\S+)$", re.MULTILINE)


def counted(server: Server) -> dict[tuple[str, str], float]:
    """Each metric with its labels, sorted as text, and its value."""
    with urllib.request.urlopen(server.metrics_url, timeout=30) as answer:
        text = answer.read().decode()
    return {(name, ",".join(sorted(labels.split(",")))): float(value) for name, labels, value in LINE.findall(text)}


def test_the_alerts_metrics_are_there_with_their_labels(served: Server) -> None:
    found = counted(served)
    of_triton = {name: labels - {"namespace", "pod"} for name, labels in METRICS.items() if name.startswith("nv_")}
    assert of_triton
    for name, labels in of_triton.items():
        given = [set(re.findall(r'(\w+)="', text)) for known, text in found if known == name]
        assert given
        assert all(one == labels for one in given)


def test_a_request_that_the_models_code_refuses_counts_as_a_success_as_the_page_says(served: Server) -> None:
    model, before = served.models[0], counted(served)
    body = json.dumps({"text_input": "Hello", "max_tokens": -3}).encode()
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{served.http_url}/v2/models/{model}/generate", data=body, timeout=30)
    assert refused.value.code == 400
    by = grown(served, model, before)
    assert [by["nv_inference_request_success"], by.get("nv_inference_request_failure", 0.0)] == [1.0, 0.0]


def grown(server: Server, model: str, before: dict[tuple[str, str], float]) -> dict[str, float]:
    """By how much a model's counts of requests grew, once they have: Triton answers first and counts then."""
    end = time.monotonic() + 30
    while True:
        by: dict[str, float] = {}
        for (name, labels), value in counted(server).items():
            if f'model="{model}"' in labels and name in ("nv_inference_request_success", "nv_inference_request_failure"):
                by[name] = by.get(name, 0.0) + value - before.get((name, labels), 0.0)
        if any(by.values()) or time.monotonic() > end:
            return by
        time.sleep(0.1)
