"""lm-eval run over our engine: its own tasks, prompts, filters and scores, with our log-likelihoods and answers.

lm-eval is offline here: data comes from this machine or from a cache that is already there, and a task that executes what a model wrote is
refused before it is loaded.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from components.common.errors import ConfigurationError, InputError, TunelineError
from components.common.progress import Reporter
from components.evaluation.task import Continuation, Decoding, Engine
from components.evaluation.tasks import asking, reading, task_files
from components.evaluation.tasks.config import LMEval
from components.evaluation.tasks.lm_eval_metrics import metric_of
from components.evaluation.tasks.perplexity import UNKNOWN_ROOM

OFFLINE = ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE", "HF_EVALUATE_OFFLINE", "TRANSFORMERS_OFFLINE")
SEED = 1234  # lm-eval's own for examples and numpy; its random module begins with 0
BUILDERS: Mapping[str, tuple[str, dict[str, str]]] = {  # of the datasets library, which finds out their columns' types
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".parquet": ("parquet", {}),
}
NLTK_HINT = "pip install --no-deps llama-index-core, whose wheel holds punkt_tab (embedded.txt), or name nltk's data in NLTK_DATA."
LAYOUT_HINT = "Give every row the fields that the task's templates name, and more rows than it has shots."
MAX_GEN_TOKS = 256  # tokens of an answer where the task says nothing, as lm-eval's hf backend


@dataclass(frozen=True)
class Outcome:
    """What lm-eval measured of a task: its score by metric, and every document's sample, in the documents' order."""

    scores: Mapping[str, float]
    samples: Sequence[Mapping[str, Any]]


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """No network for the libraries that lm-eval reads data with, their bars off, and what they print kept from standard output."""
    before = {name: os.environ.get(name) for name in (*OFFLINE, "TOKENIZERS_PARALLELISM")}
    os.environ.update(dict.fromkeys(OFFLINE, "1"), TOKENIZERS_PARALLELISM="false")
    import datasets
    import huggingface_hub

    flags = [(datasets.config, "HF_HUB_OFFLINE"), (datasets.config, "HF_DATASETS_OFFLINE"), (huggingface_hub.constants, "HF_HUB_OFFLINE")]
    were = [(place, name, getattr(place, name)) for place, name in flags if hasattr(place, name)]
    for place, name, _ in were:
        setattr(place, name, True)
    datasets.disable_progress_bars()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(sys.stderr), _without_bars():
            yield
    finally:
        for place, name, value in were:
            setattr(place, name, value)
        for name, was in before.items():
            os.environ.pop(name) if was is None else os.environ.__setitem__(name, was)


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """No bar of tqdm, which reads its environment only when it is imported: progress is told by the reporter, and on request as JSON."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    begin = tqdm.__init__

    def quiet(self: Any, *told: Any, **options: Any) -> None:
        begin(self, *told, **{**options, "disable": True})

    tqdm.__init__ = quiet
    try:
        yield
    finally:
        tqdm.__init__ = begin


@contextlib.contextmanager
def _nltk_kept_here(path: Path) -> Iterator[None]:
    """For a task whose own code names nltk: its data is that of this machine, and a download is refused.

    nltk takes more than a second to import, so that other tasks do without.
    """
    if not any(b"nltk" in file.read_bytes() for file in path.parent.glob("*.py")):
        yield
        return
    import nltk

    download, places = nltk.download, list(nltk.data.path)
    nltk.download = _refuse_download
    nltk.data.path[:0] = bundled_nltk()
    try:
        yield
    finally:
        nltk.download, nltk.data.path[:] = download, places


def _refuse_download(*told: Any, **_: Any) -> None:
    what = ", ".join(str(one) for one in told) or "its data"
    raise ConfigurationError(f"the task needs nltk's {what}, which is not on this machine, and nothing is downloaded", hint=NLTK_HINT)


def bundled_nltk() -> list[str]:
    """The folder of nltk's data inside the llama-index-core wheel, where that is installed."""
    import importlib.util

    try:
        found = importlib.util.find_spec("llama_index.core")
    except ModuleNotFoundError:
        return []
    roots = (found.submodule_search_locations if found else None) or []
    return [str(folder) for root in roots if (folder := Path(root) / "_static" / "nltk_cache").is_dir()]


def run(settings: LMEval, engine: Engine, reporter: Reporter, *, asked_alone: bool = False) -> Outcome:
    """Measure a task; `asked_alone` builds its requests and measures nothing. Raises ConfigurationError or InputError as `loaded` does."""
    with offline(), tempfile.TemporaryDirectory() as folder, _own_random(), _nltk_kept_here(_file(settings)):
        from lm_eval import evaluator

        task = loaded(settings, folder)
        name = str(task.config.task)
        if asked_alone:
            _check_measured(settings, task.aggregation(), task.aggregation())
            task.override_metric(metric_name="bypass")
        task.aggregation().update({metric: _without_end(found) for metric, found in task.aggregation().items()})
        with _of_these_rows(settings) if asked_alone else contextlib.nullcontext():
            found = evaluator.evaluate(
                lm=through(engine, reporter),
                task_dict={"tasks": {name: task}},
                limit=settings.max_items,
                bootstrap_iters=0,
                log_samples=True,
                apply_chat_template=settings.chat,
                fewshot_as_multiturn=settings.chat,
            )
        return _outcome(found, name, settings, asked_alone)


def _without_end(aggregation: Callable[[Any], float]) -> Callable[[Any], float]:
    """An aggregation that is infinite where lm-eval's own overflows: the perplexity of a model that knows nothing at all."""

    def aggregated(values: Any) -> float:
        try:
            return aggregation(values)
        except OverflowError:
            return float("inf")

    return aggregated


@contextlib.contextmanager
def _own_random() -> Iterator[None]:
    """lm-eval's seeds for as long as it runs."""
    import numpy

    state, other = random.getstate(), numpy.random.get_state()
    random.seed(0)
    numpy.random.seed(SEED)
    try:
        yield
    finally:
        random.setstate(state)
        numpy.random.set_state(other)


def loaded(settings: LMEval, folder: str) -> Any:
    """lm-eval's task with its data, which is unpacked into `folder`; called within `offline`.

    Raises ConfigurationError for an unknown task, a group, one that runs code, or one without local data, and InputError for data that
    would have to be downloaded or cannot be read.
    """
    local, path = task_files.is_path(settings.task), _file(settings)
    told = task_files.whole(path)
    if not isinstance(told.get("task"), str):
        raise ConfigurationError(f"{settings.task} is a group of tasks", hint="Name its tasks one by one.")
    task_files.check_safe(told, path)
    if settings.data:
        return _built(settings, path, _own_data(told, settings.data, folder))
    if not local:
        return _built(settings, path, {})
    task_files.check_local(told, path)
    files = task_files.placed(told["dataset_kwargs"]["data_files"], path)
    return _built(settings, path, {"dataset_kwargs": {**told["dataset_kwargs"], "data_files": files, "cache_dir": folder}})


def _file(settings: LMEval) -> Path:
    """The file that defines a task. Raises ConfigurationError for a name that lm-eval does not have."""
    return Path(settings.task).expanduser() if task_files.is_path(settings.task) else _packaged(settings.task)


@cache
def _packaged(name: str) -> Path:
    """The task file of a name. Raises ConfigurationError for one that lm-eval does not have.

    Found by the text of the files, since lm-eval's own index parses all 14,000 of them.
    """
    import difflib

    import lm_eval

    said, told = re.compile(rb"^task:[ \t]*[\"']?([^\s\"'#]+)", re.MULTILINE), list[str]()
    for path in sorted((Path(lm_eval.__file__).parent / "tasks").rglob("*.yaml")):
        names = {found.decode() for found in said.findall(path.read_bytes())}
        if name in names:
            return path
        told += names
    near = difflib.get_close_matches(name, told, 3)
    hint = f"Near to it: {', '.join(near)}." if near else "lm-eval ls tasks lists them."
    raise ConfigurationError(f"lm-eval has no task {name}", hint=hint)


def _own_data(told: Mapping[str, Any], data: str, folder: str) -> dict[str, Any]:
    """The settings by which a task reads a local file in place of its dataset."""
    split = told.get("test_split") or told.get("validation_split") or "test"
    others = {name: None for name in ("training_split", "validation_split", "test_split", "fewshot_split") if told.get(name)}
    builder, options = BUILDERS.get(reading.kind(data), ("json", {}))
    file = _written(data, folder) if builder == "json" else Path(data).expanduser().resolve()
    kwargs = {"data_files": {split: str(file)}, "cache_dir": folder, **options}
    return {**others, "test_split": split, "dataset_path": builder, "dataset_name": None, "dataset_kwargs": kwargs}


def _written(data: str, folder: str) -> Path:
    """The rows of a file as the JSON lines that the datasets library reads: of the layouts that we read it knows but some."""
    file = Path(folder) / "rows.jsonl"
    file.write_text("".join(json.dumps(one.row) + "\n" for one in reading.records(data)), encoding="utf-8")
    return file


def _built(settings: LMEval, path: Path, changes: Mapping[str, Any]) -> Any:
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    try:
        found = TaskManager(include_defaults=False).load([{**load_yaml(path), **changes}])
    except TunelineError:
        raise
    except Exception as error:  # whatever the task's own functions say of rows that they do not know
        hint = "Nothing is downloaded: name its documents, a file of JSON lines, in data."
        raise InputError(
            f"lm-eval's task {settings.task} cannot be loaded{_from(settings)}: {_first_line(error)}",
            hint=LAYOUT_HINT if settings.data else hint,
        ) from None
    (task,) = found["tasks"].values()
    if getattr(task, "UNSAFE_CODE", False):
        raise ConfigurationError(f"task {settings.task} executes code that the model wrote, and no task may", hint="Take the task out.")
    if settings.shots is not None and task.get_config("num_fewshot") != 0:
        task.set_config(key="num_fewshot", value=settings.shots)
    elif task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=SEED)
    return task


@contextlib.contextmanager
def _of_these_rows(settings: LMEval) -> Iterator[None]:
    """While requests are made and no model is asked: what lm-eval says of rows that its templates do not fit is told of the rows."""
    try:
        yield
    except TunelineError:
        raise
    except Exception as error:
        raise InputError(
            f"lm-eval's task {settings.task} cannot ask its rows{_from(settings)}: {_first_line(error)}", hint=LAYOUT_HINT
        ) from None


def _from(settings: LMEval) -> str:
    return f" from {settings.data}" if settings.data else ""


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def _outcome(found: Mapping[str, Any], name: str, settings: LMEval, asked_alone: bool) -> Outcome:
    samples = found["samples"][name]
    filters = list(dict.fromkeys(one["filter"] for one in samples))
    chosen = settings.filter or filters[0]
    if chosen not in filters:
        raise ConfigurationError(f"task {settings.task} has no filter {chosen}", hint=f"It has {', '.join(filters)}.")
    mine = sorted((one for one in samples if one["filter"] == chosen), key=lambda one: int(one["doc_id"]))
    if asked_alone:
        return Outcome({}, mine)
    scores = {metric: found["results"][name].get(f"{metric},{chosen}") for metric in settings.metrics}
    measured = [key.partition(",")[0] for key in found["results"][name] if "," in key and "_stderr" not in key]
    _check_measured(settings, [metric for metric, score in scores.items() if score is not None], measured)
    better = found.get("higher_is_better", {}).get(name, {})
    for metric in settings.metrics:
        if better.get(metric) is not None and bool(better[metric]) != (metric_of(metric, settings).better == "higher"):
            raise ConfigurationError(
                f"task {settings.task} says that {metric} is better when {'higher' if better[metric] else 'lower'}",
                hint="Say so with lower_is_better.",
            )
    return Outcome({metric: float(score) for metric, score in scores.items() if score is not None}, mine)


def _check_measured(settings: LMEval, found: Iterable[str], there: Iterable[str]) -> None:
    """Raise ConfigurationError for metrics of the settings that are not among those found."""
    if missing := sorted(set(settings.metrics) - set(found)):
        raise ConfigurationError(
            f"task {settings.task} does not measure {', '.join(missing)}", hint=f"It measures {', '.join(sorted(set(there)))}."
        )


def through(engine: Engine, reporter: Reporter) -> Any:
    """lm-eval's model interface to our engine. Texts become tokens as in lm-eval's hf backend."""
    return _class()(engine, reporter)


@cache
def _class() -> Any:
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    class Through(TemplateLM):  # type: ignore[misc]
        """Asks the engine what lm-eval asks its model."""

        def __init__(self, engine: Engine, reporter: Reporter) -> None:
            super().__init__()
            self.engine, self.reporter, self.tokenizer = engine, reporter, engine.tokenizer

        @property
        def eot_token_id(self) -> Any:
            return self.tokenizer.eos_token_id

        @property
        def prefix_token_id(self) -> int:
            return asking.first_token(self.tokenizer)

        @property
        def max_length(self) -> int:
            return self.engine.room or UNKNOWN_ROOM

        @property
        def tokenizer_name(self) -> str:
            return "tokenizer"

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            if add_special_tokens is None:
                return asking.encode(self.tokenizer, string)
            return list(self.tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"])

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
            return str(self.tokenizer.apply_chat_template(chat_history, tokenize=False, **options))

        def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
            asked = [asking.continuation(context, after, self.max_length) for _, context, after in requests]
            return [(one.logprob, one.greedy) for one in self.engine.likelihoods(asked, self.reporter)]

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            windows: list[list[Continuation]] = []
            for (text,) in (request.args for request in requests):
                rolled = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
                windows.append([asking.continuation(before, after, self.max_length) for before, after in map(make_disjoint_window, rolled)])
            found = iter(self.engine.likelihoods([one for some in windows for one in some], self.reporter))
            return [sum(next(found).logprob for _ in some) for some in windows]

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            return generated(self.engine, [request.args for request in requests], self.reporter)

    return Through


def generated(engine: Engine, requests: Sequence[tuple[str, Mapping[str, Any]]], reporter: Reporter) -> list[str]:
    """Answers to lm-eval's requests: a context and how to decode. Raises ConfigurationError for a task that samples."""
    by_decoding: dict[Decoding, list[int]] = {}
    for place, (_, options) in enumerate(requests):
        by_decoding.setdefault(decoding_of(options), []).append(place)
    answers = [""] * len(requests)
    for decoding, places in by_decoding.items():
        contexts = [asking.encode(engine.tokenizer, requests[place][0]) for place in places]
        prompts = asking.within_room(contexts, engine.room or UNKNOWN_ROOM, decoding.max_new_tokens, reporter)
        for place, answer in zip(places, engine.answers(prompts, decoding, reporter), strict=True):
            answers[place] = answer
    return answers


def decoding_of(options: Mapping[str, Any]) -> Decoding:
    """How a request of lm-eval is answered. Raises ConfigurationError for one that samples."""
    if options.get("do_sample") and options.get("temperature", 1.0):
        raise ConfigurationError(
            "the task samples its answers, and models are compared by greedy ones", hint="Choose a greedy variant of the task."
        )
    until = options.get("until") or []
    stops = [until] if isinstance(until, str) else list(until)
    most = next((options[name] for name in ("max_gen_toks", "max_new_tokens", "max_tokens") if options.get(name)), MAX_GEN_TOKS)
    return Decoding(int(most), tuple(stop for stop in stops if stop))
