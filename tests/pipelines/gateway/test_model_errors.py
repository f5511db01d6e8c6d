"""Errors for clients from messages of Triton and the model, in-process."""

from __future__ import annotations

import pytest

from pipelines.gateway.triton_models import translate_model_error


@pytest.mark.parametrize(
    ("message", "status", "shown"),
    [
        ("all 24 slots and queue positions are occupied; retry later", 429, "all slots and queue positions"),
        ("the engine model tiny version 1 is not loaded", 503, "being replaced or unloaded"),
        (
            "[request id: <id_unknown>] Server is stopping, scheduler for model has stopped accepting new inference "
            "requests",
            503,
            "being replaced or unloaded",
        ),
        ("Request for unknown model: 'tiny_stream' has no available versions", 503, "being replaced or unloaded"),
        ("internal error: KeyError; see the server's log", 500, "the model failed to answer"),
        ("top_p is 0; it must be above 0", 400, "top_p is 0"),
    ],
)
def test_message_of_the_model_becomes_an_error_for_the_client(message: str, status: int, shown: str) -> None:
    error = translate_model_error(message)
    assert error.status == status
    assert shown in str(error.as_json())
