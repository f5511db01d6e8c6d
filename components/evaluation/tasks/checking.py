"""Tasks looked at before anything is trained: their files read and their rows made to items, as the evaluation will make them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from components.common.errors import TunelineError
from components.common.progress import Reporter
from components.evaluation import keeping
from components.evaluation.task import Given, Item
from components.evaluation.tasks import asking, harness, memorisation, preference, table
from components.evaluation.tasks.config import Common, HeldOut, LMEval, Memorisation, Preference, files


@dataclass(frozen=True)
class Asked:
    """What a task asks of each model: its items, and the tokens they read and at most write. None: rows of a dataset still to be made."""

    settings: Common
    digest: str = ""
    items: int | None = None
    read: int = 0
    written: int = 0

    @property
    def known_by_files(self) -> bool:
        """Whether the digests of its files say what is asked; lm-eval's own tasks read a cache of their own."""
        return self.items is None or bool(files(self.settings))


def look(
    tasks: Sequence[Common], tokenizer: Any, seed: int, max_length: int, reporter: Reporter, context: int | None = None
) -> list[Asked]:
    """Make the items of every task that has its own; `context` is how many tokens the model reads, where that is known. Raises what the
    evaluation would, hours earlier and with the task's place: ConfigurationError for a file, a task of lm-eval or a variable that is not
    there, InputError for rows that cannot be asked, or for answers that leave no room for a prompt."""
    given = Given(tokenizer, None, max_length, seed, reporter)
    return [_looked_at(settings, f"evaluation.tasks[{place}]", given, context) for place, settings in enumerate(tasks)]


def needed(tasks: Sequence[Common]) -> bool:
    """Whether any task has something to look at beside the dataset."""
    return any(not isinstance(settings, HeldOut) for settings in tasks)


def _looked_at(settings: Common, where: str, given: Given, context: int | None) -> Asked:
    task = table.build(settings)
    try:
        asking.check_room(context, *_longest(settings))
        items = task.items(given)
        _check_asked(settings, items, given, context)
    except asking.NoDatasetError:
        return Asked(settings)
    except TunelineError as error:
        message = error.message if error.message.startswith(where) else f"{where}: {error.message}"
        raise type(error)(message, hint=error.hint) from None
    written = len(items) * int(getattr(settings, "max_new_tokens", 0))
    return Asked(settings, keeping.task_digest(task, items, []), len(items), sum(item.length for item in items), written)


def _longest(settings: Common) -> tuple[int, str]:
    """The tokens of a task's longest answer, and the setting that says so; none for tasks that ask for no answer."""
    match settings:
        case HeldOut():
            return settings.generation_tokens if settings.generations else 0, "generation_tokens"
        case Memorisation():
            return settings.tokens + memorisation.SPARE, "tokens"
    return int(getattr(settings, "max_new_tokens", 0)), "max_new_tokens"


def _check_asked(settings: Common, items: Sequence[Item], given: Given, context: int | None) -> None:
    """Put one item of every sequence of roles through the chat template, which may refuse it, and see how long lm-eval's answers are."""
    by_roles = {_roles(item): item for item in reversed(items)}
    for item in by_roles.values():
        if isinstance(settings, Preference):
            for side in preference.SIDES:
                preference.completion(given.tokenizer, item, side)
        elif "messages" in item.ask and item.ask.get("chat", True):
            asking.prompt_ids(given.tokenizer, item)
    if isinstance(settings, LMEval):
        options = [part for item in items for request in item.ask["requests"] for part in request if isinstance(part, dict)]
        longest = max((harness.decoding_of(one).max_new_tokens for one in options), default=0)
        asking.check_room(context, longest, "max_gen_toks in the task's generation_kwargs")


def _roles(item: Item) -> tuple[Any, ...]:
    """What a chat template tells conversations apart by: their roles, and whether there are tools."""
    turns = [item.ask.get(name) or [] for name in ("messages", "prompt", *preference.SIDES)]
    roles = [tuple(str(m["role"]) for m in some) if isinstance(some, list) else () for some in turns]
    return (*roles, bool(item.ask.get("tools")))
