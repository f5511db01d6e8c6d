"""The gateway's metrics match the alerts, the dashboard and the autoscalers."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from components.triton_packaging.triton_server import Server
from pipelines.gateway.telemetry import GatewayMetrics
from pipelines.gateway.triton_models import ServedModel
from tests.docs.test_alerts import METRICS, POD
from tests.pipelines.gateway.conftest import SLOTS
from tests.pipelines.gateway.gateway_process import GatewayProcess, running_gateway


def read_labels(text: str) -> dict[str, set[str]]:
    """Return the labels of each of the gateway's metrics."""
    families = text_string_to_metric_families(text)
    return {
        sample.name: set(sample.labels)
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@pytest.mark.triton
def test_scraped_metrics_and_labels_are_the_documented_ones(gateway: GatewayProcess, client: openai.OpenAI) -> None:
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]
    client.chat.completions.create(model="tiny", messages=messages, max_tokens=4)
    text = gateway.send("GET", "/metrics")[2].decode()
    expected = {name: labels - POD for name, labels in METRICS.items() if name.startswith("tuneline_")}
    assert read_labels(text) == expected
    assert f'tuneline_gateway_slots{{model="tiny",version="1"}} {SLOTS}.0' in text
    assert "tuneline_gateway_ready_models 1.0" in text


@pytest.mark.triton
def test_triton_metrics_follow_those_of_the_gateway(triton: Server, tmp_path: Path) -> None:
    with running_gateway(triton.grpc_url, tmp_path / "log", "--metrics-socket", str(triton.metrics_socket)) as gateway:
        text = gateway.send("GET", "/metrics")[2].decode()
    assert text.index("\ntuneline_gateway_ready_models 1.0\n") < text.index(
        '\nnv_inference_request_success{model="tiny'
    )


def test_gateway_without_triton_has_no_ready_model(tmp_path: Path) -> None:
    with running_gateway(f"unix:{tmp_path}/nothing", tmp_path / "log") as gateway:
        text = gateway.send("GET", "/metrics")[2].decode()
    assert "tuneline_gateway_ready_models 0.0" in text
    assert "tuneline_gateway_slots{" not in text


def test_slots_are_those_of_the_models_that_are_served_now() -> None:
    def served(name: str, adapter: str = "", version: str = "1", slots: int | None = 4) -> ServedModel:
        return ServedModel(name, adapter, "python", "", version, "", None, slots, frozenset(), True, 0)

    metrics = GatewayMetrics()
    metrics.record_models([served("a"), served("a", adapter="b"), served("c", slots=None)])
    metrics.record_models([served("a", version="2"), served("a", adapter="b", version="2")])
    samples = [sample for family in metrics.slots.collect() for sample in family.samples]
    assert [(sample.labels, sample.value) for sample in samples] == [({"model": "a", "version": "2"}, 4)]
    assert metrics.registry.get_sample_value("tuneline_gateway_ready_models") == 2
