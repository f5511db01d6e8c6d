"""What Triton counts of a package's requests is what docs/monitoring.md and its alerts go by."""

from __future__ import annotations

import json
import re
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
    after = counted(served)
    grown = {key: value - before.get(key, 0.0) for key, value in after.items() if f'model="{model}"' in key[1] and "_request_" in key[0]}
    assert {name: by for (name, _), by in grown.items() if name == "nv_inference_request_success"} == {"nv_inference_request_success": 1.0}
    assert all(by == 0 for (name, _), by in grown.items() if name == "nv_inference_request_failure")
