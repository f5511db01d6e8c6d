"""A headless Chromium, driven over the pipe of its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 30.0
# The browser's own requests (updates, safe browsing, field trials) would reach other hosts.
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip


class Connection:
    """The pipe to a browser, which all tabs share. `events` are collected by the session of their tab."""

    def __init__(self, requests: int, responses: int) -> None:
        self._requests, self._responses = requests, responses
        self._number, self._buffer = 0, b""
        self.events: dict[str, list[dict[str, Any]]] = {}

    def call(self, method: str, parameters: dict[str, Any], session: str = "") -> dict[str, Any]:
        """Call a method and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        os.write(self._requests, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while (answer := self.receive(deadline)).get("id") != self._number:
            pass
        assert "error" not in answer, f"{method}: {answer['error']}"
        return dict(answer["result"])

    def receive(self, deadline: float) -> dict[str, Any]:
        """Return the next message; an event is also added to the events of its session."""
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._responses], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self._responses, 1 << 20) if ready else b""
            assert part, "Chromium does not answer"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer = dict(json.loads(message))
        if "method" in answer:
            self.events.setdefault(answer.get("sessionId", ""), []).append(answer)
        return answer


class Page:
    """One tab."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        target = connection.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = connection.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session = str(attached["sessionId"])
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    @property
    def events(self) -> list[dict[str, Any]]:
        """All events of the tab: requests, console messages, exceptions."""
        return self._connection.events.setdefault(self._session, [])

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the tab and return its result."""
        return self._connection.call(method, parameters, self._session)

    def open(self, url: str) -> None:
        """Open a URL and wait until the page is loaded."""
        earlier, deadline = len(self.events), time.monotonic() + TIMEOUT_SECONDS
        self.send("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events[earlier:]):
            self._connection.receive(deadline)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; promises are awaited."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_until(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"{expression} is never true; the page shows:\n{self.text()}"
            time.sleep(0.02)

    def text(self, selector: str = "body") -> str:
        """Return the visible text of an element."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def type(self, selector: str, text: str) -> None:
        """Replace the text of a field, as typing does."""
        name = json.dumps(selector)
        self.evaluate(f"(e => {{ e.focus(); e.value = ''; }})(document.querySelector({name}))")
        self.send("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key: Enter or Escape."""
        code = {"Enter": 13, "Escape": 27}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        parameters = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.send("Input.dispatchKeyEvent", type="keyDown", **parameters, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **parameters)

    def click(self, selector: str) -> None:
        """Click the first element that matches."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def screenshot(self, path: Path, *, width: int = 1280, height: int = 860, dark: bool = False) -> None:
        """Write a PNG file of the page at this size."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=scheme)
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def requested_urls(self) -> list[str]:
        """Return the URLs of all requests of the page."""
        return [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]

    def problems(self) -> list[str]:
        """Return violations of the Content-Security-Policy, uncaught exceptions and errors of the console."""
        entries = [e["params"]["entry"] for e in self.events if e["method"] == "Log.entryAdded"]
        # A response with an error status is logged; the page handles it.
        problems = [entry["text"] for entry in entries if entry["level"] == "error" and entry["source"] != "network"]
        problems += [json.dumps(e["params"]) for e in self.events if e["method"] == "Runtime.exceptionThrown"]
        return problems


@contextmanager
def running_chromium(program: str, folder: Path) -> Iterator[Callable[[], Page]]:
    """Start a browser whose profile is in `folder`, and yield a function that opens a tab."""
    request_reader, request_writer = os.pipe()
    response_reader, response_writer = os.pipe()
    command = [program, *OPTIONS, f"--user-data-dir={folder}"]
    # The browser reads requests from descriptor 3 and writes responses to 4.
    redirected = ["bash", "-c", f'exec "$@" 3<&{request_reader} 4>&{response_writer}', "chromium", *command]
    with (folder / "chromium.log").open("wb") as log:
        browser = subprocess.Popen(
            redirected, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(request_reader, response_writer),
            start_new_session=True,
        )  # fmt: skip
    os.close(request_reader)
    os.close(response_writer)
    try:
        connection = Connection(request_writer, response_reader)
        yield lambda: Page(connection)
    finally:
        os.close(request_writer)  # the browser ends with its pipe
        try:
            browser.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(browser.pid, 9)
            browser.wait()
        os.close(response_reader)
