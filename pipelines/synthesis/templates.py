"""Prompt templates: versioned files of this package, and the user's own files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from components.common.artifacts import hashing
from components.common.runtime.errors import UsageError
from components.common.runtime.yaml_loading import describe_yaml_error, load_yaml
from pipelines.synthesis.passages import Passage
from pipelines.synthesis.row_kinds import KINDS, RowKind

FOLDER = Path(__file__).parent / "templates"
DELIMITER_TAG = re.compile(r"<(/?)\s*passage\s*>", re.IGNORECASE)
MAX_TEMPLATE_BYTES = 100_000


class TemplateFile(BaseModel):
    """The keys of a template file.

    Attributes:
        kind: a key of KINDS.
        styles: descriptions of the row, of which the requests about a passage use one after the other.
        system: the system message.
        user: the user message with the placeholders {passage} and {style}.
    """

    model_config = ConfigDict(extra="forbid")

    kind: str
    styles: list[str] = Field(min_length=1)
    system: str = Field(min_length=1)
    user: str = Field(min_length=1)


class PromptTemplateFile(TemplateFile):
    """The keys of a template file for rows from prompts.

    Attributes:
        styles: as above, but optional.
        system: instructions to the teacher before the system message of the prompt; the rows do not contain them.
        user: the last user turn with the placeholders {prompt} and {style}; the rows contain the prompt only.
    """

    styles: list[str] = Field([""], min_length=1)
    system: str = ""


@dataclass(frozen=True)
class Template:
    """A prompt template.

    Attributes:
        name: the name with its version, such as qa@1; of a user's file, the file's name.
        sha256: the digest of the file.
        file: the content of the file.
    """

    name: str
    sha256: str
    file: TemplateFile

    @property
    def kind(self) -> RowKind:
        """The kind of the rows."""
        return KINDS[self.file.kind]

    def build_messages(self, passage: Passage, number: int) -> list[dict[str, str]]:
        """Return the messages of the request with this number about a passage or prompt, counted from 0."""
        user = self.file.user.replace("{style}", self.file.styles[number % len(self.file.styles)])
        before, _, after = user.partition(f"{{{self.kind.reads}}}")
        if self.kind.reads == "prompt":
            *earlier, last = passage.messages
            messages = [*earlier, {"role": "user", "content": before + last["content"] + after}]
            if not self.file.system:
                return [dict(message) for message in messages]
            own = [messages.pop(0)["content"]] if messages[0]["role"] == "system" else []
            return [{"role": "system", "content": "\n\n".join([self.file.system, *own])}, *map(dict, messages)]
        # The passage cannot end its own quotation.
        quoted = DELIMITER_TAG.sub(r"< \1passage>", passage.text)
        return [{"role": "system", "content": self.file.system}, {"role": "user", "content": before + quoted + after}]


def list_templates() -> list[str]:
    """Return the names of the package's templates."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_templates(names: Sequence[str]) -> list[Template]:
    """Return the templates with these names or paths.

    Raises:
        UsageError: a template does not exist or is invalid, or the templates write rows of several kinds, or read
            passages and prompts.
    """
    templates = [_load_template(name) for name in dict.fromkeys(names)]
    reads = {template.kind.reads: f"{template.name} ({template.kind.reads}s)" for template in templates}
    if len(reads) > 1:
        raise UsageError(
            f"--template: {' and '.join(reads.values())} read different sources",
            hint="Run the command once for documents and once for rows, with separate output folders.",
        )
    contents = {template.kind.content: template.name for template in templates}
    if len(contents) > 1:
        described = " and ".join(f"{name} ({kind})" for kind, name in contents.items())
        raise UsageError(
            f"--template: {described} write rows of different kinds, which one dataset cannot hold",
            hint="Run the command once for each kind of row, with separate output folders.",
        )
    return templates


def _load_template(name: str) -> Template:
    own = FOLDER / f"{name}.yaml"
    path = own if name in list_templates() else Path(name)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TEMPLATE_BYTES + 1)
        if len(content) > MAX_TEMPLATE_BYTES:
            raise _describe_problem(name, f"has more than {MAX_TEMPLATE_BYTES:,} bytes")
        value = load_yaml(content.decode())
        named = KINDS.get(str(value.get("kind"))) if isinstance(value, dict) else None
        file_class = PromptTemplateFile if named and named.reads == "prompt" else TemplateFile
        parsed = file_class.model_validate(value)
    except OSError as error:
        raise UsageError(
            f"--template: {name!r} is neither a template nor a readable file: {error.strerror}",
            hint=f"Use {', '.join(list_templates())}, or the path of a template file.",
        ) from None
    except yaml.YAMLError as error:
        raise _describe_problem(name, f"is not YAML: {describe_yaml_error(error)}") from None
    except UnicodeDecodeError:
        raise _describe_problem(name, "is not UTF-8") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise _describe_problem(name, f"{'.'.join(map(str, first['loc'])) or 'content'}: {first['msg']}") from None
    if parsed.kind not in KINDS:
        raise _describe_problem(name, f"kind is {parsed.kind!r}; expected {', '.join(KINDS)}")
    if (placeholder := f"{{{KINDS[parsed.kind].reads}}}") not in parsed.user:
        raise _describe_problem(name, f"user has no placeholder {placeholder}")
    return Template(path.stem if path == own else path.name, hashing.sha256_file(path), parsed)


def _describe_problem(name: str, problem: str) -> UsageError:
    return UsageError(
        f"--template: {name}: {problem}",
        hint="Expected the keys kind, styles, system and user; user contains {passage} or {prompt}. See docs/how-to/synthetic-data.md.",
    )
