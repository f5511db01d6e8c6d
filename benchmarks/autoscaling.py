"""Records the gateway's metrics under an increasing number of clients, for the simulation of the autoscaler.

    python -m benchmarks.autoscaling [--output tests/deploy/recorded_load.json]

A real Triton serves a tiny model behind a real gateway. Each client sends one request after the other, and waits for Retry-After after a 429.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.machine import ROOT
from components.common.models import model_loading
from components.common.runtime.reporters import SilentReporter
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.stage import package
from components.triton_packaging.triton_server import running_server
from tests.pipelines.gateway.gateway_process import CHAT, GatewayProcess, running_gateway
from tests.tiny import tiny_model

CLIENTS = (1, 2, 4, 8, 12, 16, 24, 32, 40)
SECONDS_PER_STEP, SCRAPE_SECONDS, WARM_UP_SECONDS = 2.0, 0.25, 0.5
SLOTS, QUEUE, MAX_TOKENS = 8, 16, 32
SAMPLES = {
    "tuneline_gateway_running_requests": "running",
    "tuneline_gateway_slots": "slots",
    "tuneline_gateway_completion_tokens_total": "completion_tokens",
}


def scrape(gateway: GatewayProcess) -> dict[str, float]:
    """Return running requests and slots, and the counts of tokens and of answers by status."""
    text = gateway.send("GET", "/metrics")[2].decode()
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "tuneline_gateway_requests_total" and sample.labels["endpoint"] == "chat":
                name = f"status_{sample.labels['status']}"
            elif sample.name in SAMPLES:
                name = SAMPLES[sample.name]
            else:
                continue
            values[name] = values.get(name, 0) + sample.value
    return values


def send_requests(gateway: GatewayProcess, stop: threading.Event) -> None:
    """Send one request after the other until the event is set."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": MAX_TOKENS}
    while not stop.is_set():
        _, headers, _ = gateway.send("POST", CHAT, body)
        if "retry-after" in headers:
            stop.wait(float(headers["retry-after"]))


def record(gateway: GatewayProcess) -> list[dict[str, Any]]:
    """Return one entry per number of clients, with a scrape each quarter of a second after the warm-up."""
    steps = []
    for clients in CLIENTS:
        stop = threading.Event()
        threads = [threading.Thread(target=send_requests, args=(gateway, stop)) for _ in range(clients)]
        for thread in threads:
            thread.start()
        time.sleep(WARM_UP_SECONDS)
        began, scrapes = time.monotonic(), []
        while (elapsed := time.monotonic() - began) <= SECONDS_PER_STEP:
            scrapes.append({"seconds": round(elapsed, 2), **scrape(gateway)})
            time.sleep(SCRAPE_SECONDS)
        stop.set()
        for thread in threads:
            thread.join()
        steps.append({"clients": clients, "scrapes": scrapes})
        print(clients, scrapes[-1], flush=True)
    return steps


def main() -> None:
    """Record the load, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "tests" / "deploy" / "recorded_load.json")
    output: Path = parser.parse_args().output
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = TritonPackagingConfig(model_name="tiny", prove=False, slots=SLOTS, max_queue=QUEUE)
        model = model_loading.open_model(tiny_model(folder / "model"))
        package(model, folder / "repository", config, seed=1, reporter=SilentReporter())
        with (
            running_server(folder / "repository", models=["tiny", "tiny_stream"], log=folder / "triton.log") as server,
            running_gateway(server.grpc_url, folder / "gateway.log") as gateway,
        ):
            steps = record(gateway)
    lines = ",\n".join(json.dumps(step) for step in steps)
    settings = {"slots": SLOTS, "queue": QUEUE, "max_tokens": MAX_TOKENS}
    output.write_text(f'{{"settings": {json.dumps(settings)},\n"steps": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
