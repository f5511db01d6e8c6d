"""Notifications about the end of a Kubeflow run: chat messages, e-mails and webhooks, sent by Apprise."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from components.common.runtime.errors import EngineMissingError
from pipelines.config.platform_config import RunEvent

MAX_BODY_CHARACTERS = 1500  # Discord accepts 2,000 with the title

if TYPE_CHECKING:
    from apprise import Apprise


def open_service(variable: str) -> Apprise:
    """Return the notification service whose Apprise URL is the value of an environment variable.

    Raises:
        EngineMissingError: Apprise is not installed.
        ValueError: the variable is not set, or Apprise does not support the URL. The message omits the URL, which
            contains credentials.
    """
    try:
        from apprise import Apprise
    except ImportError:
        raise EngineMissingError(
            "apprise, which sends notifications, is not installed",
            hint="Use an image that is built from images/evaluation.Containerfile.",
        ) from None
    logging.getLogger("apprise").setLevel(logging.CRITICAL)  # its messages contain URLs
    url, service = os.environ.get(variable, "").strip(), Apprise()
    if not url:
        raise ValueError(f"the URL is {'empty' if variable in os.environ else 'not set'}")
    if not service.add(url):
        raise ValueError("Apprise does not support the URL; expected for example slack://, mailto:// or json://")
    return service


def send_notifications(
    notifications: Sequence[Mapping[str, Any]], events: Sequence[RunEvent], title: str, body: str
) -> dict[str, str]:
    """Send a message to every service that is configured for one of the events. A failure raises no error.

    Args:
        notifications: {"name", "variable", "events"} of each service; `variable` contains its Apprise URL.
        events: the end of the run.
        title: subject of the message.
        body: text of the message; the end of a long text is left out, because chat services refuse it.

    Returns:
        The result by name: "sent", or the reason of the failure.
    """
    results = {}
    for notification in notifications:
        if not set(events) & set(notification["events"]):
            results[notification["name"]] = f"not configured for {' or '.join(events)}"
            continue
        try:
            sent = open_service(notification["variable"]).notify(
                title=title,
                body=body if len(body) <= MAX_BODY_CHARACTERS else f"{body[:MAX_BODY_CHARACTERS]}…",
                notify_type="failure" if "failed" in events else "info",
                body_format="text",
            )
            results[notification["name"]] = "sent" if sent else "not sent: the service did not accept the message"
        except (EngineMissingError, ValueError) as error:
            results[notification["name"]] = f"not sent: {error}"
    return results
