"""Tasks looked at before anything is trained: their files read and their rows made to items, as the evaluation will make them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from components.common.errors import TunelineError
from components.common.progress import Reporter
from components.evaluation import keeping
from components.evaluation.task import Given, Item
from components.evaluation.tasks import asking, table
from components.evaluation.tasks.config import Common, HeldOut, files


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


def look(tasks: Sequence[Common], tokenizer: Any, seed: int, max_length: int, reporter: Reporter) -> list[Asked]:
    """Make the items of every task that has its own. Raises what the evaluation would, hours earlier and with the task's place:
    ConfigurationError for a file, a task of lm-eval or a variable that is not there, InputError for rows that cannot be asked."""
    given = Given(tokenizer, None, max_length, seed, reporter)
    return [_looked_at(settings, f"evaluation.tasks[{place}]", given) for place, settings in enumerate(tasks)]


def needed(tasks: Sequence[Common]) -> bool:
    """Whether any task has something to look at beside the dataset."""
    return any(not isinstance(settings, HeldOut) for settings in tasks)


def _looked_at(settings: Common, where: str, given: Given) -> Asked:
    task = table.build(settings)
    try:
        items = task.items(given)
        _rendered(items[0], given)
    except asking.NoDatasetError:
        return Asked(settings)
    except TunelineError as error:
        message = error.message if error.message.startswith(where) else f"{where}: {error.message}"
        raise type(error)(message, hint=error.hint) from None
    written = len(items) * int(getattr(settings, "max_new_tokens", 0))
    return Asked(settings, keeping.task_digest(task, items, []), len(items), sum(item.length for item in items), written)


def _rendered(item: Item, given: Given) -> None:
    """Put the first prompt through the chat template, which may refuse it."""
    if "messages" in item.ask and item.ask.get("chat", True):
        asking.prompt_ids(given.tokenizer, item)
