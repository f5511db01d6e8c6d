"""The chat page in a real browser, with models that answer from a script. Starts a browser: long tier."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from pipelines.gateway import api_keys
from tests.engines.chromium import Page
from tests.pipelines.chat.fake_models import FakeModels, running_gateway

pytestmark = [pytest.mark.chromium, pytest.mark.long]
LAST_ANSWER = "[...document.querySelectorAll('section:{column} .content')].at(-1)"


@pytest.fixture
def models() -> FakeModels:
    return FakeModels()


@pytest.fixture
def feedback(tmp_path: Path) -> Path:
    return tmp_path / "feedback.jsonl"


@pytest.fixture
def gateway(models: FakeModels, feedback: Path) -> Iterator[str]:
    with running_gateway(models, feedback=feedback) as url:
        yield url


@pytest.fixture
def page(new_tab: Callable[[], Page], gateway: str) -> Iterator[Page]:
    """The opened page. At its end, nothing was requested from another host and no policy was violated."""
    page = open_page(new_tab, gateway)
    yield page
    hosts = {urlsplit(url).netloc for url in page.requested_urls() if not url.startswith("data:")}
    assert hosts == {urlsplit(gateway).netloc}
    assert page.problems() == []


def open_page(new_tab: Callable[[], Page], url: str) -> Page:
    page = new_tab()
    page.open(f"{url}/chat")
    page.wait_until("document.querySelector('select').options.length === 2")
    return page


def say(page: Page, text: str) -> None:
    page.type("#message", text)
    page.press("Enter")


def wait_for_answers(page: Page, count: int) -> None:
    page.wait_until(
        f"document.querySelectorAll('.feedback').length === {count} && !document.querySelector('#send').hidden"
    )


def test_answer_streams_and_the_conversation_has_several_turns(page: Page, models: FakeModels) -> None:
    say(page, "endless")
    page.wait_until("document.querySelector('.content').innerText.length > 50")
    first = page.text(".content")
    assert page.text(".facts") == "answering"
    page.wait_until(f"document.querySelector('.content').innerText.length > {len(first) + 50}")
    assert page.text(".content").startswith(first)
    page.click("#stop")
    wait_for_answers(page, 1)
    assert "stopped" in page.text(".facts")
    stopped = page.text(".content")
    say(page, "And then?")
    wait_for_answers(page, 2)
    roles = [(message["role"], message["content"].strip()) for message in models.requests[-1]["messages"]]
    assert roles == [("user", "endless"), ("assistant", stopped.strip()), ("user", "And then?")]
    facts = page.evaluate("[...document.querySelectorAll('.facts')].at(-1).innerText")
    assert facts.startswith("version 7 · 10 + 4 tokens · first token ")


def test_text_of_the_model_is_never_markup(page: Page) -> None:
    say(page, "code")
    wait_for_answers(page, 1)
    assert page.evaluate("document.querySelector('.content pre code').textContent") == 'print("<b>bold</b>")'
    assert page.evaluate("document.querySelectorAll('.content img, .content b').length") == 0
    assert '<img src=x onerror="document.title=1"> stays text.' in page.text(".content")
    assert page.evaluate("document.title") == "Chat · tuneline"


def test_settings_reach_the_model_and_invalid_ones_are_explained(page: Page, models: FakeModels) -> None:
    page.click("summary")
    for name, value in {"system": "Be brief.", "temperature": "0.5", "max_tokens": "9", "seed": "3"}.items():
        page.type(f"[name={name}]", value)
    say(page, "Hello")
    wait_for_answers(page, 1)
    request = models.requests[-1]
    assert request["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (request["temperature"], request["max_tokens"], request["seed"]) == (0.5, 9, 3)
    page.type("[name=temperature]", "7")
    say(page, "Hello again")
    page.wait_until("document.querySelector('.failed')")
    assert "Temperature is not valid" in page.text(".failed")


def test_shift_enter_starts_a_line_and_escape_stops(page: Page, models: FakeModels) -> None:
    page.type("#message", "one")
    page.press("Enter", shift=True)
    page.send("Input.insertText", text="two")
    assert models.requests == []
    page.press("Enter")
    wait_for_answers(page, 1)
    assert models.requests[-1]["messages"][-1]["content"] == "one\ntwo"
    say(page, "endless")
    page.wait_until(f"{LAST_ANSWER.format(column='first-child')}.innerText.length > 20")
    page.press("Escape")
    wait_for_answers(page, 2)


def test_two_columns_stream_at_the_same_time_from_two_models(page: Page, models: FakeModels) -> None:
    page.click("#compare")
    say(page, "endless")
    for column in ("first-child", "last-child"):
        page.wait_until(f"{LAST_ANSWER.format(column=column)}?.innerText.length > 20")
    assert page.evaluate("document.querySelectorAll('[aria-busy=true]').length") == 2
    page.click("#stop")
    wait_for_answers(page, 2)
    assert sorted(request["model"] for request in models.requests) == ["echo", "other"]
    say(page, "refuse")
    page.wait_until("document.querySelectorAll('.failed').length === 2")
    assert "at most 2048 are allowed" in page.text(".failed")
    say(page, "Hello")  # the refused message is not part of the conversation
    wait_for_answers(page, 4)
    assert [message["content"] for message in models.requests[-1]["messages"]][::2] == ["endless", "Hello"]
    page.click("#compare")
    assert page.evaluate("document.querySelectorAll('section').length") == 1


def test_new_chat_forgets_a_running_answer(page: Page, models: FakeModels) -> None:
    say(page, "endless")
    page.wait_until("document.querySelector('.content')?.innerText.length > 20")
    page.click("#reset")
    page.wait_until("!document.querySelector('#send').hidden")
    assert page.text(".log") == ""
    say(page, "Hello")
    wait_for_answers(page, 1)
    assert [message["content"] for message in models.requests[-1]["messages"]] == ["Hello"]


def test_feedback_is_stored(page: Page, feedback: Path) -> None:
    say(page, "Hello")
    wait_for_answers(page, 1)
    saved = "document.querySelector('.feedback [role=status]').innerText === 'Saved'"
    page.click("[data-rating=down]")
    page.wait_until(saved)
    assert page.evaluate("document.querySelector('[data-rating=down]').getAttribute('aria-pressed')") == "true"
    page.click("[data-correct]")
    page.type(".correction textarea", "Hello yourself")
    page.click(".correction button")
    page.wait_until(f"document.querySelector('.correction').hidden && {saved}")
    page.click("[data-rating=down]")
    page.wait_until("document.querySelector('[data-rating=down]').getAttribute('aria-pressed') === 'false'")
    lines = [json.loads(line) for line in feedback.read_text().splitlines()]
    assert [(line["rating"], line["correction"]) for line in lines] == [
        ("down", None),
        ("down", "Hello yourself"),
        (None, "Hello yourself"),
    ]
    assert {(line["model"], line["version"]) for line in lines} == {("echo", "7")}
    assert len({line["id"] for line in lines}) == 1


def test_answer_that_breaks_off_keeps_its_text(page: Page) -> None:
    say(page, "break")
    wait_for_answers(page, 1)
    assert page.text(".content").startswith("echo 1")
    assert page.text(".error") == "The answer was interrupted: the model failed to answer."


def test_server_without_models_can_be_tried_again(page: Page, models: FakeModels) -> None:
    models.is_down = True
    say(page, "Hello")
    page.wait_until("document.querySelector('.failed')")
    assert page.text(".failed .error") == (
        "The model cannot answer now: the model server does not respond. Try again in 1 second."
    )
    models.is_down = False
    page.click(".failed button")
    wait_for_answers(page, 1)
    assert page.evaluate("document.querySelectorAll('.failed').length") == 0


def test_key_is_requested_and_kept_for_the_tab(new_tab: Callable[[], Page], models: FakeModels, tmp_path: Path) -> None:
    secret = api_keys.create_key(tmp_path / "keys.yaml", "team", {})
    with running_gateway(models, keys=tmp_path / "keys.yaml") as url:
        page = new_tab()
        page.open(f"{url}/chat")
        page.wait_until("!document.querySelector('#key-form').hidden")
        assert page.text("#notice span") == "This server requires an API key."
        page.type("#key", "tl-wrong")
        page.press("Enter")
        page.wait_until("document.querySelector('#notice span').innerText.includes('does not accept')")
        page.type("#key", secret)
        page.press("Enter")
        page.wait_until("document.querySelector('#key-form').hidden && document.querySelector('#notice').hidden")
        say(page, "Hello")
        page.wait_until("document.querySelector('.content')?.innerText.includes('Hello')")
        assert page.evaluate("document.querySelectorAll('.feedback').length") == 0, "this gateway stores no feedback"
        page.open(f"{url}/chat")
        page.wait_until("document.querySelector('select').options.length === 2")
        assert page.evaluate("JSON.stringify(localStorage) + document.cookie") == "{}"
        assert page.problems() == []
