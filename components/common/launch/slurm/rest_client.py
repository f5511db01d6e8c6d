"""Slurm client for slurmrestd, Slurm's REST API; requires neither Slurm's commands nor a login node.

The client detects the API version by trial. It distinguishes an unresponsive service, a rejected token and a call that
Slurm rejects. The unresponsive service is the controller, slurmrestd or a proxy; a repeated call may succeed.
"""

from __future__ import annotations

import json
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from components.common.launch import JsonObject, UnresponsiveError
from components.common.launch.slurm import job_records, rest_properties
from components.common.launch.slurm.access_token import RENEW_HINT, Token, TokenError
from components.common.launch.slurm.job_records import JobRecord
from components.common.launch.slurm.slurm_client import (
    UNRESPONSIVE_MESSAGES,
    RefusedError,
    contains_any,
    is_already_ended,
)
from components.common.launch.slurm.slurm_settings import SlurmSettings
from components.common.runtime import http_client
from components.common.runtime.errors import ConfigurationError, TunelineError

REQUEST_TIMEOUT_SECONDS = 120.0  # without a controller, slurmrestd answers after about ten seconds
API_VERSIONS = (43, 42, 41, 40, 39, 38, 37, 44, 45, 46)  # N of v0.0.N in the order of trials, tested schemas first
SCRIPT_IN_JOB_VERSION = 41  # the first version in which the script is a property of the job
DENIED_STATUSES = (401, 403, 407, 511)
RETRYABLE_STATUSES = (408, 425, 429, 502, 503, 504)
RETRY_MESSAGE = "try again later"  # the answer to cancelling a job that is just starting or ending
# Messages for a rejected token. The controller of Slurm 22 causes one of AMBIGUOUS_MESSAGES instead.
DENIED_MESSAGES = ("authentica", "credential")
AMBIGUOUS_MESSAGES = ("unspecified error", "zero bytes were transmitted")
UNUSED_JOB_ID = (1 << 26) - 2  # signalling a job that cannot exist shows whether the controller accepts the user
MAX_PROBES, PROBE_INTERVAL_SECONDS = 3, 1.0  # a starting or stopping controller returns the same error once
JOB_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin:/opt/slurm/bin"
DOCS_HINT = "See docs/how-to/slurm.md for the requirements on slurmrestd."


@dataclass(frozen=True)
class _Answer:
    status: int
    content: JsonObject | None  # None: not a JSON object
    text: str

    @property
    def errors(self) -> str:
        return job_records.format_errors((self.content or {}).get("errors") or [])

    @property
    def message(self) -> str:
        return self.errors or " ".join(self.text.split())[:300] or f"HTTP {self.status}"


class RestClient:
    """Client that calls slurmrestd.

    In addition to the errors that `SlurmClient` documents, methods raise TokenError for a rejected token. They raise
    ConfigurationError if the address or the API version cannot be used.
    """

    def __init__(self, settings: SlurmSettings) -> None:
        self._url, self._token = settings.rest, Token(settings.rest_token_file, settings.rest_user)
        self._version: int = 0  # not known yet
        self._was_accepted = False

    def submit(self, script: Path) -> str:
        """Submit a batch script, with its directives as properties of the job, and return the job's id.

        Raises:
            ConfigurationError: a directive of the script has no equivalent in slurmrestd.
            RefusedError: slurmrestd rejected the job, returned no job id, or ignored properties of the job.
        """
        text = script.read_text(encoding="utf-8")
        version = self._find_version()
        job = {"current_working_directory": str(script.parent), **rest_properties.parse_script(text, version)}
        is_list = version >= rest_properties.DATA_PARSER_VERSION
        job["environment"] = [f"PATH={JOB_PATH}"] if is_list else {"PATH": JOB_PATH}
        body = {"job": {**job, "script": text}} if version >= SCRIPT_IN_JOB_VERSION else {"job": job, "script": text}
        answer = self._request("POST", "slurm", "job/submit", body)
        result, warnings = answer.get("result") or {}, answer.get("warnings") or []
        number = job_records.parse_number(answer.get("job_id")) or job_records.parse_number(result.get("job_id"))
        if not number:
            reported = job_records.format_errors(warnings) or "none"
            message = f"slurmrestd accepted the job, but returned no job id; warnings: {reported}"
            raise RefusedError(message, hint=DOCS_HINT)
        # slurmrestd ignores unknown properties with a warning: the job would run without its accelerators.
        unknown = [warning for warning in warnings if "unknown" in str(warning.get("description")).lower()]
        if unknown:
            self.cancel(str(number))
            raise RefusedError(
                f"slurmrestd v0.0.{self._version} ignored properties of the job: {job_records.format_errors(unknown)}",
                hint=DOCS_HINT,
            )
        return str(number)

    def list_jobs(self, name: str) -> list[JobRecord]:
        """Return the controller's jobs of this name, including jobs that ended a few minutes ago."""
        return [job for job in job_records.parse_jobs(self._request("GET", "slurm", "jobs")) if job.name == name]

    def list_accounted(self, job: str) -> list[JobRecord]:
        """Return the accounting records of a job; empty if accounting is disabled."""
        try:
            return job_records.parse_jobs(self._request("GET", "slurmdb", f"job/{job}"))
        except RefusedError:
            return []

    def cancel(self, job: str, signal: str = "") -> None:
        """Cancel a job; do nothing if a signal is given or the job has ended.

        slurmrestd would also signal the batch script and srun, which would end the job before it saves. The file `stop`
        in the job folder requests the stop instead.
        """
        if signal:
            return
        try:
            self._request("DELETE", "slurm", f"job/{job}")
        except RefusedError as error:
            if not is_already_ended(error):
                raise

    def _find_version(self) -> int:
        """Return N of the API version v0.0.N: the first version for which `ping` does not return 404."""
        if self._version:
            return self._version
        for version in API_VERSIONS:
            answer = self._call("GET", f"slurm/v0.0.{version}/ping")
            if answer.status == 404:
                continue
            if answer.status in (*DENIED_STATUSES, *RETRYABLE_STATUSES) or "meta" not in (answer.content or {}):
                raise self._translate(answer)
            self._version = version
            return version
        message = (
            f"launcher.slurm.rest: no slurmrestd of a supported version answers at {self._url}; supported versions: "
            f"v0.0.{min(API_VERSIONS)} to v0.0.{max(API_VERSIONS)}"
        )
        raise ConfigurationError(message, hint=DOCS_HINT)

    def _request(self, method: str, api: str, path: str, body: JsonObject | None = None) -> JsonObject:
        """Return the content of an answer without errors. Raises the errors of `_translate` and `_call`."""
        answer = self._call(method, f"{api}/v0.0.{self._find_version()}/{path}", body)
        if answer.content is not None:
            is_ok = answer.status == 200 and "meta" in answer.content and not answer.errors
            if is_ok or answer.content.get("job_id"):  # a held job has an error and an id
                self._was_accepted = True
                return answer.content
        if answer.status == 404 and api == "slurm" and not answer.errors:  # slurmrestd was updated while the job runs
            message = f"slurmrestd at {self._url} no longer supports the API version in use, v0.0.{self._version}"
            self._version = 0
            raise UnresponsiveError(message)
        raise self._translate(answer)

    def _translate(self, answer: _Answer) -> TunelineError:
        """Return the error for an answer."""
        status, message = answer.status, answer.message
        if status in DENIED_STATUSES or contains_any(message, DENIED_MESSAGES):
            return self._build_token_error(message)
        if answer.errors and status >= 500 and contains_any(message, AMBIGUOUS_MESSAGES):
            is_rejected = self._is_token_rejected()
            return self._build_token_error(message) if is_rejected else UnresponsiveError(f"slurmrestd: {message}")
        if status in RETRYABLE_STATUSES or (not answer.errors and status >= 500):
            return UnresponsiveError(f"{self._url} returned HTTP {status}")
        if answer.errors:
            if contains_any(message, (RETRY_MESSAGE, *UNRESPONSIVE_MESSAGES)):
                return UnresponsiveError(f"slurmrestd: {message}")
            return RefusedError(f"slurmrestd: {message}", hint=DOCS_HINT)
        if status == 404 and self._was_accepted:
            return RefusedError(f"slurmrestd at {self._url} returned HTTP 404", hint=DOCS_HINT)
        message = f"launcher.slurm.rest: the server at {self._url} is not slurmrestd: HTTP {status}"
        return ConfigurationError(message, hint=DOCS_HINT)

    def _is_token_rejected(self) -> bool:
        """Return whether the controller rejects this user; Slurm 22 reports the reason of an error only for signals."""
        if self._token.get_expiry():
            return True
        for number in range(MAX_PROBES):
            if number:
                time.sleep(PROBE_INTERVAL_SECONDS)
            answer = self._call("DELETE", f"slurm/v0.0.{self._version}/job/{UNUSED_JOB_ID}?signal=CONT")
            if not contains_any(answer.errors, (*AMBIGUOUS_MESSAGES, *DENIED_MESSAGES)):
                return False
        return True

    def _build_token_error(self, reason: str) -> TunelineError:
        """Return the error; retryable for a previously accepted token file, which may be renewed while the job runs."""
        expiry = self._token.get_expiry()
        problem = f"has expired ({expiry})" if expiry else f"is not accepted by Slurm at {self._url}: {reason}"
        error_class = UnresponsiveError if self._was_accepted and self._token.file else TokenError
        return error_class(f"the token in {self._token.source} {problem}", hint=RENEW_HINT)

    def _call(self, method: str, path: str, body: JsonObject | None = None) -> _Answer:
        """Send one request. Raises UnresponsiveError, or ConfigurationError if the certificate is not trusted."""
        url = f"{self._url}/{path}"
        headers = {**self._token.build_headers(), "Content-Type": "application/json", "Accept": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, headers, method=method)  # noqa: S310 - http(s), by the settings
        try:
            try:
                response = http_client.build_opener(url).open(request, timeout=REQUEST_TIMEOUT_SECONDS)
            except urllib.error.HTTPError as error:
                response = error
            with response:
                text = response.read().decode("utf-8", "replace")
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, ssl.SSLCertVerificationError):
                hint = "Set SSL_CERT_FILE to the CA certificate; on Kubeflow, network.certificates in platform.yaml."
                message = f"launcher.slurm.rest: the certificate of {self._url} is not trusted: {reason.verify_message}"
                raise ConfigurationError(message, hint=hint) from None
            message = f"{self._url} does not answer ({str(reason) or type(reason).__name__})"
            raise UnresponsiveError(message) from None
        try:
            content = json.loads(text)
        except ValueError:
            content = None
        return _Answer(response.status, content if isinstance(content, dict) else None, text)
