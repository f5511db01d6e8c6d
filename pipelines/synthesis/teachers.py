"""Teachers: models at an OpenAI-compatible endpoint, or on this machine, that answer requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from components.common.artifacts import hashing
from components.common.artifacts.artifact_folder import ArtifactInput
from pipelines.synthesis.journal import Journal
from pipelines.synthesis.teacher_budget import TeacherBudget, estimate_tokens

Message = Mapping[str, str]


@dataclass(frozen=True)
class Sampling:
    """Sampling of answers: temperature (0 is greedy), top_p, the maximum length in tokens, and the seed of the run."""

    temperature: float
    top_p: float
    max_tokens: int
    seed: int


@dataclass(frozen=True)
class TeacherRequest:
    """A request to a teacher.

    Attributes:
        key: the digest of all that determines the answer.
        messages: the conversation.
        schema: JSON schema of the answer; None for plain text.
        sampling: the sampling; its seed is that of the run.
        seed: the seed of this answer.
    """

    key: str
    messages: Sequence[Message]
    schema: Mapping[str, Any] | None
    sampling: Sampling
    seed: int

    @property
    def input_tokens(self) -> int:
        """The estimated tokens of the prompt."""
        return estimate_tokens(message["content"] for message in self.messages)


class Teacher(Protocol):
    """A model that answers requests.

    Attributes:
        name: the model's name in the provenance of the rows.
        sha256: the digest of the weights; of an endpoint, the digest of its URL and the model's name.
        concurrency: the number of requests that are answered at the same time.
        inputs: the entries of the model in the manifest.
    """

    name: str
    sha256: str
    concurrency: int
    inputs: Sequence[ArtifactInput]

    def answer(
        self,
        requests: Sequence[TeacherRequest],
        journal: Journal,
        budget: TeacherBudget,
        count: Callable[[], None],
    ) -> None:
        """Add the answers of the requests that are not in the journal to the journal and the budget.

        Args:
            count: called after each answer.

        Raises:
            TeacherBudgetReachedError: the next request could exceed a limit.
            InterruptedRunError: the endpoint does not answer after all retries.
            EngineMissingError: the endpoint rejects the key, the model or the path.
        """


def build_request(
    teacher: Teacher, messages: Sequence[Message], schema: Mapping[str, Any] | None, sampling: Sampling, number: int
) -> TeacherRequest:
    """Return a request.

    Args:
        number: distinguishes requests with equal messages.
    """
    asked = [dict(message) for message in messages]
    key = hashing.digest([teacher.sha256, vars(sampling), asked, None if schema is None else dict(schema), number])
    return TeacherRequest(key, messages, schema, sampling, int(key[:8], 16) & 0x7FFF_FFFF)


@dataclass(frozen=True)
class TeacherOptions:
    """Where a teacher is, and the limits of its requests.

    Attributes:
        option: the option that names the teacher, for errors.
        source: URL of an endpoint without /chat/completions, folder or source of a model, or NAME@ALIAS.
        model: name of the model at the endpoint; "" for its only model.
        key_variable: environment variable with the API key; "" for no key.
        concurrency: the maximum number of concurrent requests, or the answers per batch of a local model.
        timeout_seconds: timeout of a request.
        retries: maximum number of retries of a request.
    """

    option: str
    source: str
    model: str = ""
    key_variable: str = ""
    concurrency: int = 4
    timeout_seconds: float = 120.0
    retries: int = 3
