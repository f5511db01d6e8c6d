"""Chat template and tokenizer of a model's folder, without transformers and torch.

They load in a tenth of a second, and in images without torch. Rendered texts and tokens are those of transformers.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.common.models.chat_templates import DEFAULT_CHAT_TEMPLATE
from components.common.runtime import cpu_cores
from components.common.runtime.errors import get_first_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL_TOKENS = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
# transformers uses these marks to find the assistant's text; they do not change the rendered text.
GENERATION_MARK = re.compile(r"(\{%[-+]?)\s*(end)?generation\s*([-+]?%\})")


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer without truncation and padding, and set its number of threads.

    Raises:
        ValueError: tokenizer.json is invalid.
    """
    threads = cpu_cores.get_thread_count()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true" if threads > 1 else "false")
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises bare exceptions
        raise ValueError(f"tokenizer.json cannot be read: {get_first_line(error)[:300]}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@dataclass(frozen=True)
class ChatTemplate:
    """A model's chat templates by name, and its special tokens."""

    templates: Mapping[str, Callable[..., str]]
    tokens: Mapping[str, str]

    @property
    def end_token(self) -> str:
        """The end-of-sequence token; "" if it is not set."""
        return self.tokens.get("eos_token", "")

    @staticmethod
    def load(folder: Path) -> ChatTemplate:
        """Load the templates of a model folder, or the default template.

        Raises:
            ValueError: a template or tokenizer_config.json is invalid.
        """
        path = folder / "tokenizer_config.json"
        settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        settings = settings if isinstance(settings, dict) else {}
        source = settings.get("chat_template")
        if (template := folder / "chat_template.jinja").is_file():
            source = template.read_text(encoding="utf-8")
        sources = {"default": DEFAULT_CHAT_TEMPLATE}
        if isinstance(source, list):
            sources |= {entry["name"]: entry["template"] for entry in source}
        elif isinstance(source, str) and source:
            sources["default"] = source
        sources |= {
            path.stem: path.read_text(encoding="utf-8") for path in folder.glob("additional_chat_templates/*.jinja")
        }
        tokens = {}
        for name in SPECIAL_TOKENS:
            value = settings.get(name)
            text = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(text, str) and text:
                tokens[name] = text
        return ChatTemplate({name: _compile_template(text) for name, text in sources.items()}, tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: object = None) -> str | None:
        """Render a conversation; return None if the template rejects it, as in training.

        Args:
            messages: the turns, each with role and content.
            tools: the parsed JSON of the row's tools; None for a row without tools.
        """
        from jinja2 import TemplateError

        render = self.templates.get("tool_use" if tools else "default") or self.templates["default"]
        try:
            return render(
                messages=list(messages), tools=tools, documents=None, add_generation_prompt=False, **self.tokens
            )
        except (TemplateError, TypeError):
            return None


def _compile_template(source: str) -> Callable[..., str]:
    """Compile a template in a sandbox with the functions that transformers provides. Raises ValueError."""
    from datetime import datetime

    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def to_json(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    sandbox.filters["tojson"] = to_json
    sandbox.globals["raise_exception"] = raise_exception
    sandbox.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    plain = GENERATION_MARK.sub(lambda mark: f"{mark[1]} {'endif' if mark[2] else 'if true'} {mark[3]}", source)
    try:
        return sandbox.from_string(plain).render
    except jinja2.TemplateError as error:
        raise ValueError(f"invalid chat template: {error}") from None
