"""Capture of answered requests: decides which are captured, and hands them to the writer."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter

from pipelines.capture import traffic_bucket
from pipelines.capture.settings import CaptureSettings
from pipelines.capture.spool_upload import SpoolUploader
from pipelines.capture.traffic_files import Row
from pipelines.capture.traffic_rows import ABORTED, COMPLETE, FAILED, AnswerFacts, build_row
from pipelines.capture.traffic_writer import Outcome, TrafficWriter
from pipelines.gateway.completions import Completion


@dataclass(frozen=True)
class CapturedRequest:
    """A request that will be captured after its answer.

    Attributes:
        body: the request.
        size: size of the request in bytes.
        subject: the subject, not yet hashed, or "".
        consent: value of the consent header that grants, or None: not asked, or not sent.
        client: name of the API key.
    """

    body: Mapping[str, Any]
    size: int
    subject: str
    consent: str | None
    client: str
    timestamp: int


class TrafficCapture:
    """Captures answered requests as the capture file configures it.

    Args:
        settings: the capture file.
        registry: receives the metrics of the rows and uploads.

    Raises:
        ConfigurationError, EngineMissingError: rows cannot be stored in the bucket, or not be erased from it.
    """

    def __init__(self, settings: CaptureSettings, registry: CollectorRegistry) -> None:
        self._settings = settings
        kind, _, header = settings.subject.source.partition(" ")
        self._subject_kind, self._subject_header = kind, header.lower()
        self._rows = Counter(
            "tuneline_gateway_captured_rows",
            "Rows of captured traffic by outcome: written, dropped, too_large, no_consent, no_subject, erased or failed.",
            ("model", "outcome"), registry=registry,
        )  # fmt: skip
        self._uploader = None
        if settings.bucket:
            uploads = Counter(
                "tuneline_gateway_capture_uploads",
                "Uploads of files of captured traffic to the bucket by outcome: uploaded or failed.",
                ("outcome",), registry=registry,
            )  # fmt: skip
            self._uploader = SpoolUploader(settings, lambda outcome: uploads.labels(outcome).inc())
        self._writer = TrafficWriter(traffic_bucket.get_spool(settings) if settings.bucket else settings, self._count)

    def _count(self, model: str, outcome: Outcome) -> None:
        self._rows.labels(model, outcome).inc()

    def select(
        self, model: str, body: Mapping[str, Any], size: int, headers: Mapping[str, str], client: str
    ) -> CapturedRequest | None:
        """Return the request if it will be captured: its model is sampled, and its client consents.

        Args:
            model: name of the model that answers.
            body: the request.
            size: size of the request in bytes.
            headers: headers of the request by name in lower case.
            client: name of the API key.
        """
        capture = self._settings.models.get(model)
        if capture is None or random.random() >= capture.sampling_rate:  # noqa: S311
            return None
        rule = self._settings.consent
        sent = None if rule.policy == "not_asked" else headers.get(rule.header)
        consent = next((value for value in rule.granted if value.lower() == (sent or "").strip().lower()), None)
        if consent is None and (rule.policy == "required" or sent is not None):
            self._count(model, "no_consent")
            return None
        subject = self._find_subject(body, headers, client)
        if not subject and self._subject_kind != "none":
            self._count(model, "no_subject")  # such a row could not be erased
            return None
        return CapturedRequest(body, size, subject, consent, client, int(time.time()))

    def _find_subject(self, body: Mapping[str, Any], headers: Mapping[str, str], client: str) -> str:
        values = {"user": body.get("user"), "key": client, "header": headers.get(self._subject_header)}
        subject = values.get(self._subject_kind)
        return subject if isinstance(subject, str) else ""

    def submit(
        self,
        request: CapturedRequest,
        completion: Completion,
        status: int,
        seconds: float,
        first: float | None,
        *,
        shadowed: Completion | None = None,
    ) -> bool:
        """Queue the row of an answered request, and return whether it was queued.

        The text of an aborted answer is the text so far.

        Args:
            request: the selected request.
            completion: the answer after its end.
            status: HTTP status.
            seconds: duration of the answer.
            first: seconds to the first token; an answer without a token is not captured.
            shadowed: the client's answer, if `completion` is a shadow model's. The row is stored with that answer's row,
                which has the request; a failed shadow answer is captured without a token too.
        """
        if first is None and shadowed is None:
            return False
        model = (shadowed or completion).model.client_name

        def build() -> Row:
            served, settings = completion.model, self._settings
            subject = settings.hash_subject(request.subject) if request.subject else None
            facts = AnswerFacts(
                model=served.client_name,
                version=completion.version,
                model_sha256=served.model_sha256,
                repository_sha256=served.repository_sha256,
                subject=subject,
                consent=request.consent,
                sampling_rate=settings.models[model].sampling_rate,
                state={200: COMPLETE, 499: ABORTED}.get(status, FAILED),
                status=status,
                seconds=round(seconds, 4),
                first_token_seconds=None if first is None else round(first, 4),
            )
            return build_row(
                {} if shadowed else request.body,
                completion.format_response(),
                facts,
                timestamp=request.timestamp,
                workload=completion.call.model,
                client=subject or "" if self._subject_kind == "key" else request.client,
                shadow_of=shadowed.id if shadowed else "",
            )

        return self._writer.submit(model, request.size, build, label=completion.model.client_name)

    def hash_author(self, author: str) -> str:
        """Return the keyed hash of the author of feedback, or the author if no key is configured."""
        return author if self._subject_kind == "none" else self._settings.hash_subject(author)

    def close(self) -> None:
        """Write the queued rows, seal the files, and upload them to the bucket."""
        self._writer.close()
        if self._uploader is not None:
            self._uploader.close()
