"""Slurm by slurmrestd, its REST API: where neither its programs nor a login node can be reached.

The API's version is found by asking. An answer is told apart in silence (the controller, slurmrestd or what stands before it is away: the
same call may succeed in a moment), a token that is not accepted, and a refusal in Slurm's words.
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
from typing import Any

from components.common import web
from components.common.errors import ConfigurationError, TunelineError
from components.common.launch import SilentError
from components.common.launch.settings import Slurm
from components.common.launch.slurm import properties, states
from components.common.launch.slurm.states import Batch
from components.common.launch.slurm.token import HINT, Token, TokenError
from components.common.launch.slurm.way import SILENT, RefusedError, is_over

ANSWERS_WITHIN = 120.0  # seconds; where the controller is gone, slurmrestd says so after some ten
VERSIONS = (*range(43, 36, -1), 44, 45, 46)  # of the API, v0.0.N, in the order in which they are tried: those whose shapes are known first
IN_THE_JOB = 41  # the first version in which the script is one of the job's properties
NOT_LET_IN = (401, 403, 407, 511)  # of HTTP
NOT_NOW = (408, 425, 429, 502, 503, 504)
TRY_AGAIN = "try again later"  # a job that is just being started or ended cannot be cancelled
# What a controller says to a token that it does not accept: the later ones that, Slurm 22 nothing at all, as if it were away.
STRANGER = ("authentica", "credential")
UNCLEAR = ("unspecified error", "zero bytes were transmitted")
NO_JOB = (1 << 26) - 2  # a number that no job has: to signal it shows whether the controller listens to this user
PROBES, BETWEEN_PROBES = 3, 1.0  # a controller that just starts or ends says the same once
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin:/opt/slurm/bin"}
HELP = "docs/slurm.md explains what slurmrestd has to be like."


@dataclass(frozen=True)
class _Answer:
    status: int
    said: dict[str, Any] | None  # None: no JSON
    text: str

    @property
    def errors(self) -> str:
        return states.words((self.said or {}).get("errors") or [])

    @property
    def is_fine(self) -> bool:
        return self.status == 200 and "meta" in (self.said or {}) and not self.errors


class Rest:
    """slurmrestd."""

    def __init__(self, settings: Slurm) -> None:
        self._url, self._token = settings.rest, Token(settings.rest_token_file, settings.rest_user)
        self._version = 0  # not known yet
        self._let_in = False

    def submit(self, script: Path) -> str:
        """Hand in a script. Its directives become properties of the job, since slurmrestd does not read them."""
        text = script.read_text(encoding="utf-8")
        version = self._found_version()
        job = {"current_working_directory": str(script.parent), **properties.of_script(text, version)}
        job["environment"] = [f"{name}={value}" for name, value in ENVIRONMENT.items()] if version >= properties.PARSERS else ENVIRONMENT
        body = {"job": {**job, "script": text}} if version >= IN_THE_JOB else {"job": job, "script": text}
        answer = self._ask("POST", "slurm", "job/submit", body)
        number = states.number(answer.get("job_id")) or states.number((answer.get("result") or {}).get("job_id"))
        if not number:
            raise RefusedError(f"slurmrestd took the job and gave it no number: {states.words(answer.get('warnings') or [])}", hint=HELP)
        self._see_that_all_was_heard(str(number), answer)
        return str(number)

    def jobs(self, name: str) -> list[Batch]:
        """The jobs of this name that the controller knows: those that wait or run, and for some minutes those that have ended."""
        return [job for job in states.batches(self._ask("GET", "slurm", "jobs")) if job.name == name]

    def accounted(self, job: str) -> list[Batch]:
        """A job as the accounting has it; nothing where there is no accounting."""
        try:
            return states.batches(self._ask("GET", "slurmdb", f"job/{job}"))
        except RefusedError:
            return []

    def cancel(self, job: str, signal: str = "") -> None:
        """End a job. slurmrestd sends a signal to the batch script and srun too, which would end the job before it has saved: the file
        `stop` in its folder asks it instead."""
        if signal:
            return
        try:
            self._ask("DELETE", "slurm", f"job/{job}")
        except RefusedError as error:
            if not is_over(error):
                raise

    def _see_that_all_was_heard(self, job: str, answer: dict[str, Any]) -> None:
        """A property that slurmrestd does not know is left out with a warning: the job would run without its accelerators."""
        unheard = [one for one in answer.get("warnings") or [] if "unknown" in str(one.get("description")).lower()]
        if unheard:
            self.cancel(job)
            raise RefusedError(f"slurmrestd v0.0.{self._version} did not understand the whole job: {states.words(unheard)}", hint=HELP)

    def _found_version(self) -> int:
        """The API's version. Raises ConfigurationError where there is none."""
        if not self._version:
            self._version = next((one for one in VERSIONS if self._speaks(one)), 0)
        if not self._version:
            raise ConfigurationError(f"launcher.slurm.rest: no slurmrestd of a known version is at {self._url}", hint=HELP)
        return self._version

    def _speaks(self, version: int) -> bool:
        """Whether slurmrestd knows a version, whatever it says to the question."""
        answer = self._call("GET", f"slurm/v0.0.{version}/ping")
        if answer.status == 404:
            return False
        if answer.status in (*NOT_LET_IN, *NOT_NOW) or "meta" not in (answer.said or {}):
            raise self._reason(answer)
        return True

    def _ask(self, method: str, api: str, what: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """An answer without errors. Raises SilentError, TokenError, RefusedError or ConfigurationError."""
        answer = self._call(method, f"{api}/v0.0.{self._found_version()}/{what}", body)
        if answer.said is not None and (answer.is_fine or answer.said.get("job_id")):  # a job that is held has an error and a number
            self._let_in = True
            return answer.said
        if answer.status == 404 and api == "slurm" and not answer.errors:  # it was updated while the job runs
            self._version = 0
            raise SilentError(f"slurmrestd at {self._url} does not speak its former version any more")
        raise self._reason(answer)

    def _reason(self, answer: _Answer) -> TunelineError:
        """Why an answer is none."""
        said = answer.errors or " ".join(answer.text.split())[:300] or f"HTTP {answer.status}"
        low = said.lower()
        if answer.status in NOT_LET_IN or any(sign in low for sign in STRANGER):
            return self._not_let_in(said)
        if answer.errors and answer.status >= 500 and any(sign in low for sign in UNCLEAR):
            return self._not_let_in(said) if self._is_a_stranger() else SilentError(f"slurmrestd: {said}")
        if answer.status in NOT_NOW or (not answer.errors and answer.status >= 500):
            return SilentError(f"{self._url} answers HTTP {answer.status}")
        if answer.errors:
            silent = TRY_AGAIN in low or any(sign in low for sign in SILENT)
            return SilentError(f"slurmrestd: {said}") if silent else RefusedError(f"slurmrestd: {said}", hint=HELP)
        if answer.status == 404 and self._let_in:
            return RefusedError(f"slurmrestd at {self._url} does not know that address", hint=HELP)
        return ConfigurationError(f"launcher.slurm.rest: what answers at {self._url} is no slurmrestd: HTTP {answer.status}", hint=HELP)

    def _is_a_stranger(self) -> bool:
        """Whether the controller is there and has nothing to say to this user. Slurm 22 tells only of signals why they failed."""
        if self._token.expired():
            return True
        for number in range(PROBES):
            if number:
                time.sleep(BETWEEN_PROBES)
            answer = self._call("DELETE", f"slurm/v0.0.{self._version}/job/{NO_JOB}?signal=CONT")
            if not any(sign in answer.errors.lower() for sign in (*UNCLEAR, *STRANGER)):
                return False
        return True

    def _not_let_in(self, said: str) -> TunelineError:
        """A token in a file may be renewed in a moment, where it was good before: the job runs on meanwhile."""
        expired = self._token.expired()
        why = f"has expired ({expired})" if expired else f"is not accepted by Slurm at {self._url}: {said}"
        message = f"the token in {self._token.place} {why}"
        return (SilentError if self._let_in and self._token.file else TokenError)(message, hint=HINT)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> _Answer:
        """One request. Raises SilentError where nobody answers, ConfigurationError for a certificate that is not trusted."""
        url = f"{self._url}/{path}"
        headers = {**self._token.headers(), "Content-Type": "application/json", "Accept": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, headers, method=method)  # noqa: S310 - http(s), the settings see to that
        try:
            with web.opener(url).open(request, timeout=ANSWERS_WITHIN) as response:
                return _answer(response.status, response.read())
        except urllib.error.HTTPError as error:
            return self._answered_with(error)
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, ssl.SSLCertVerificationError):
                hint = "Name the authority's certificate in SSL_CERT_FILE; on Kubeflow, by network.certificates of platform.yaml."
                message = f"launcher.slurm.rest: the certificate of {self._url} is not trusted: {reason.verify_message}"
                raise ConfigurationError(message, hint=hint) from None
            raise SilentError(f"{self._url} does not answer ({str(reason) or type(reason).__name__})") from None

    def _answered_with(self, error: urllib.error.HTTPError) -> _Answer:
        try:
            with error:
                return _answer(error.code, error.read())
        except (OSError, HTTPException):
            raise SilentError(f"{self._url} broke off its answer (HTTP {error.code})") from None


def _answer(status: int, body: bytes) -> _Answer:
    text = body.decode("utf-8", "replace")
    try:
        said = json.loads(text)
    except ValueError:
        said = None
    return _Answer(status, said if isinstance(said, dict) else None, text)
