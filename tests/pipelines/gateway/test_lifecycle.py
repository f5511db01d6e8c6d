"""Start, keys, drain and a missing model server, with gateway processes of their own."""

from __future__ import annotations

import http.client
import json
import queue
import socket
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from components.common.runtime.errors import EngineMissingError
from components.triton_packaging.triton_server import Server
from pipelines.gateway import addresses, api_keys, process
from pipelines.gateway.process import GatewayOptions
from tests.pipelines.gateway.gateway_process import CHAT, HEADERS, GatewayProcess, running_gateway

pytestmark = pytest.mark.triton
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


def test_keys_limit_who_may_do_what(triton: Server, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    user = api_keys.create_key(keys, "user", {"requests_per_minute": 3})
    monitor = api_keys.create_key(keys, "monitor", {"scopes": ["metrics"]})
    with running_gateway(triton.grpc_url, tmp_path / "log", "--keys", str(keys)) as gateway:
        statuses = [
            gateway.send("POST", CHAT, BODY, {"Authorization": header} if header else {})[0]
            for header in ("", "Bearer nothing", f"Bearer {monitor}", *[f"Bearer {user}"] * 4)
        ]
        assert statuses == [401, 401, 403, 200, 200, 200, 429]
        assert gateway.send("GET", "/metrics", None, {"Authorization": f"Bearer {user}"})[0] == 403
        metrics = gateway.send("GET", "/metrics", None, {"Authorization": f"Bearer {monitor}"})[2].decode()
        assert 'completion_tokens_total{key="user",model="tiny",version="1"} 12' in metrics
        assert gateway.send("GET", "/v1/models")[0] == 401
        assert gateway.send("GET", "/health/ready")[0] == 200  # a probe has no key
        client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        assert user not in (tmp_path / "log").read_text()


def test_a_stopping_gateway_finishes_answers_and_refuses_new_ones(triton: Server, tmp_path: Path) -> None:
    with running_gateway(triton.grpc_url, tmp_path / "log") as gateway:
        waiting = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
        waiting.request("GET", "/health/ready")
        assert waiting.getresponse().read() == b"ok\n"
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
        connection.request("POST", CHAT, json.dumps({**BODY, "max_tokens": 1000, "stream": True}), HEADERS)
        stream = connection.getresponse()
        first = stream.read(100)
        gateway.terminate()
        assert waiting.sock.recv(1) == b""  # its client connects again, to another server
        statuses = []
        for path in ("/health/ready", CHAT):
            status, headers, _ = gateway.send("POST" if path == CHAT else "GET", path, BODY)
            statuses.append((status, headers["retry-after"]))
        assert statuses == [(503, "1"), (503, "1")]
        assert (first + stream.read()).endswith(b"data: [DONE]\n\n")
        assert gateway.process.wait(10) == 0


def test_a_gateway_answers_and_closes_connections_during_the_shutdown_delay(triton: Server, tmp_path: Path) -> None:
    options = ("--shutdown-delay-seconds", "600")
    with running_gateway(triton.grpc_url, tmp_path / "log", *options) as gateway:
        kept = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
        answers = []
        for path in (CHAT, "/health/ready", CHAT, CHAT):
            kept.request("POST" if path == CHAT else "GET", path, json.dumps(BODY), HEADERS)
            answer = kept.getresponse()
            answer.read()
            answers.append((answer.status, answer.getheader("connection")))
            if len(answers) == 1:
                gateway.terminate()
                time.sleep(0.2)
        assert answers == [(200, None), (503, "close"), (200, "close"), (200, "close")]
        gateway.terminate()  # a second signal
        assert gateway.process.wait(30) == 0


def test_a_missing_model_server_is_503_and_a_returning_one_is_found(tmp_path: Path) -> None:
    with running_gateway(f"unix:{tmp_path}/nothing", tmp_path / "log") as gateway:
        assert gateway.send("GET", "/health/live")[0] == 200
        for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/health/ready")):
            status, headers, body = gateway.send(method, path, BODY)
            assert (status, headers["retry-after"]) == (503, "1")
            assert json.loads(body)["error"]["message"] == "the model server does not respond"


def test_a_public_address_needs_keys(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pipelines.cli", "gateway", "--grpc-url", "x:1", "--host", "0.0.0.0", "--json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 2
    assert "--keys is not set" in json.loads(run.stdout)["error"]["message"]


def test_an_occupied_port_is_a_clear_error() -> None:
    with addresses.listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        command = [
            sys.executable,
            "-m",
            "pipelines.cli",
            "gateway",
            "--grpc-url",
            "x:1",
            "--http-port",
            str(port),
            "--json",
        ]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 2
    assert f"port {port} on 127.0.0.1 is already in use" in json.loads(run.stdout)["error"]["message"]


def wait_for_cancellation(gateway: GatewayProcess) -> None:
    for _ in range(100):
        if gateway.count_running() == 0:
            return
        time.sleep(0.05)
    pytest.fail("the answer of a client that hung up continues")


def test_a_client_that_hangs_up_frees_its_slot(triton: Server, tmp_path: Path) -> None:
    with running_gateway(triton.grpc_url, tmp_path / "log") as gateway:
        for stream in (True, False):
            connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
            connection.request("POST", CHAT, json.dumps({**BODY, "max_tokens": 1500, "stream": stream}), HEADERS)
            time.sleep(0.3)
            assert gateway.count_running() == 1
            connection.sock.close()
            wait_for_cancellation(gateway)
        log = (tmp_path / "log").read_text()
    assert log.count("status=499") == 2
    assert "cancellation_ignored" not in log


def test_clients_that_hang_up_together_leave_the_server_up(triton: Server, tmp_path: Path) -> None:
    """The model ends the answers on request: several gRPC streams cancelled at the same time may end Triton 2.51."""
    body = json.dumps({**BODY, "max_tokens": 1500, "stream": True, "logprobs": True, "top_logprobs": 20})
    with running_gateway(triton.grpc_url, tmp_path / "log") as gateway:
        for _ in range(5):
            connections = [http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60) for _ in range(8)]
            for connection in connections:
                connection.request("POST", CHAT, body, HEADERS)
            for connection in connections[:4]:  # the others wait for a slot
                connection.getresponse().fp.read(1)
            for connection in connections:
                connection.close()
            wait_for_cancellation(gateway)
            assert gateway.send("POST", CHAT, BODY)[0] == 200
        log = (tmp_path / "log").read_text()
    assert log.count("status=499") >= 20  # a request whose client hung up early may not be read at all
    assert "cancellation_ignored" not in log


def test_a_client_that_does_not_read_is_ended_at_the_deadline(triton: Server, tmp_path: Path) -> None:
    body = json.dumps({**BODY, "max_tokens": 1500, "stream": True, "n": 4, "logprobs": True, "top_logprobs": 20})
    with running_gateway(triton.grpc_url, tmp_path / "log", "--request-seconds", "2") as gateway:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", gateway.port))
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            for _ in range(200):
                if "status=504" in (tmp_path / "log").read_text():
                    break
                time.sleep(0.05)
            else:
                pytest.fail((tmp_path / "log").read_text())
        metrics = gateway.send("GET", "/metrics")[2].decode()
    assert "\ntuneline_gateway_running_requests 0.0" in metrics


def test_a_request_is_a_span_below_the_clients_span(
    triton: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: queue.Queue[bytes] = queue.Queue()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.put(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with running_gateway(triton.grpc_url, tmp_path / "log") as gateway:
        assert gateway.send("POST", CHAT, BODY, {"traceparent": f"00-{trace}-{parent}-01"})[0] == 200
        exported = ExportTraceServiceRequest.FromString(received.get(timeout=30))
    collector.shutdown()
    [span] = exported.resource_spans[0].scope_spans[0].spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (trace, parent)
    attributes = {each.key: each.value for each in span.attributes}
    assert attributes["gen_ai.request.model"].string_value == "tiny"
    assert attributes["gen_ai.usage.output_tokens"].int_value == 4


@pytest.mark.parametrize("aborts", [1, 2])
def test_a_gateway_that_aborts_at_its_start_is_started_once_more(tmp_path: Path, aborts: int) -> None:
    """A shell script stands in for the gateway, which aborts if the machine cannot create a thread."""
    script = f"""
        echo start >> {tmp_path}/starts
        test $(wc -l < {tmp_path}/starts) -gt {aborts} || kill -ABRT $$
        echo '{{"openai_url": ""}}'
        exec sleep 60
    """
    with addresses.listen("127.0.0.1", 0) as listener:
        options = GatewayOptions(drain_seconds=0)
        gateway = process.GatewayProcess("", "", ["sh", "-c", script], listener, options)
        with pytest.raises(EngineMissingError, match="did not start") if aborts == 2 else nullcontext():
            gateway.start()
        gateway.stop()
    assert (tmp_path / "starts").read_text().count("start") == 2
