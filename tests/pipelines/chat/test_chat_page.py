"""The files of the chat page, as the gateway sends them. tests/engines/test_chat_page.py uses the page in a browser."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from email.message import Message

import pytest

from pipelines.gateway import chat_page
from tests.pipelines.chat.fake_models import FakeModels, running_gateway


@pytest.fixture(scope="module")
def gateway() -> Iterator[str]:
    with running_gateway(FakeModels()) as url:
        yield url


def get(url: str) -> tuple[Message, str]:
    with urllib.request.urlopen(url, timeout=30) as response:
        return response.headers, response.read().decode()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html"),  # leads to /chat
        ("/chat", "text/html"),
        ("/chat/chat.js", "text/javascript"),
        ("/chat/chat.css", "text/css"),
        ("/chat/config.json", "application/json"),
    ],
)
def test_each_file_has_its_type_and_the_security_headers(gateway: str, path: str, kind: str) -> None:
    headers, text = get(gateway + path)
    assert text
    assert headers.get_content_type() == kind
    assert {name: headers[name] for name in chat_page.HEADERS} == chat_page.HEADERS
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_page_has_no_inline_code_and_no_other_host(gateway: str) -> None:
    html, script, style = (get(gateway + path)[1] for path in ("/chat", "/chat/chat.js", "/chat/chat.css"))
    assert re.findall(r"<script(?! src=\"chat/chat\.js\" defer></script>)|<style|\s(?:style|on\w+)=", html) == []
    for text in (html, script, style):
        assert re.findall(r"https?://|url\(|@import|innerHTML|insertAdjacentHTML|document\.write|\beval\b", text) == []


def test_every_field_of_the_page_has_a_label(gateway: str) -> None:
    html = get(gateway + "/chat")[1]
    labelled = re.findall(r'<label[^>]* for="(\w+)"', html)
    inside_labels = "".join(re.findall(r"<label(?![^>]* for=).*?</label>", html, re.DOTALL))
    fields = re.findall(r"<(?:input|select|textarea)\b[^>]*>", html)
    assert fields
    for field in fields:
        identity = re.search(r'\bid="(\w+)"', field)
        assert (identity and identity[1] in labelled) or field in inside_labels, field
