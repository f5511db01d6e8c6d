"""Opens the teacher that the options name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from components.common.runtime.errors import UsageError
from components.common.runtime.reporters import Reporter
from components.common.workspace.artifact_store import Workdir
from pipelines.explanation.model_reference import open_reference
from pipelines.synthesis.endpoint_teacher import EndpointTeacher
from pipelines.synthesis.teachers import Teacher, TeacherOptions


@contextmanager
def open_teacher(options: TeacherOptions, work: Workdir, reporter: Reporter) -> Iterator[Teacher]:
    """Provide a teacher after a check that costs nothing: the endpoint answers, or the model is on this machine.

    Raises:
        UsageError: an option is invalid.
        ConfigurationError: the API key is not set, or the model is not available.
        EngineMissingError: the endpoint does not answer, or rejects the key.
    """
    if not options.source.strip():
        raise UsageError(
            f"{options.option} is empty",
            hint="Specify a URL such as https://teacher.example/v1, a folder, or NAME@ALIAS.",
        )
    if re.match(r"[\w.-]+:\d+(/|$)", options.source):
        raise UsageError(
            f"{options.option}: {options.source!r} has no scheme",
            hint=f"Write http://{options.source} or https://{options.source}.",
        )
    if options.source.startswith(("http://", "https://")):
        yield EndpointTeacher.open(options)
        return
    if options.model or options.key_variable:
        raise UsageError(
            f"{options.option}-model and {options.option}-key apply to an endpoint; {options.option} is {options.source!r}",
            hint=f"Set {options.option} to a URL such as https://teacher.example/v1, or omit these options.",
        )
    from pipelines.synthesis.local_teacher import LocalTeacher

    with open_reference(options.source, None, work, reporter) as (model, _):
        yield LocalTeacher(model, options.concurrency, reporter)
