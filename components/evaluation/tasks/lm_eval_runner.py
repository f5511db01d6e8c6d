"""Execution of lm-eval tasks on tuneline's inference engines.

lm-eval runs offline: data comes from local files or from an existing cache. A task that executes generated code is
rejected before it is loaded.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.common.answer_metrics import lm_eval_environment
from components.common.answer_metrics.lm_eval_environment import (
    LM_EVAL_SEED,
    NLTK_HINT,
    find_bundled_nltk,
    patch_attribute,
    set_lm_eval_seeds,
)
from components.common.runtime.errors import ConfigurationError, InputError, TunelineError
from components.common.runtime.reporters import Reporter
from components.evaluation.task_interface import Continuation, Decoding, Engine
from components.evaluation.tasks import item_encoding, lm_eval_metrics, lm_eval_task_files, record_files
from components.evaluation.tasks.lm_eval_task_files import TaskFile
from components.evaluation.tasks.perplexity import DEFAULT_WINDOW_TOKENS

if TYPE_CHECKING:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.task import ConfigurableTask

    from components.evaluation.tasks.lm_eval import LMEval

Sample = Mapping[str, Any]  # lm-eval's log of one document
ScoresAndSamples = tuple[Mapping[str, float], Sequence[Sample]]  # scores by metric; samples in order of the documents

# Builders of the datasets library that infer column types; other formats are passed as JSON lines.
DATASET_BUILDERS: Mapping[str, tuple[str, dict[str, str]]] = {
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".parquet": ("parquet", {}),
}
LAYOUT_HINT = "Give every row the fields of the task's templates, and provide more rows than shots."
DEFAULT_ANSWER_TOKENS = 256  # lm-eval's default


@contextlib.contextmanager
def offline(task: str) -> Iterator[None]:
    """Disable the network access of lm-eval's libraries, as `lm_eval_environment.offline` does, and of the task's code.

    If the task's code uses nltk, local nltk data is used and downloads raise ConfigurationError. Other tasks do not
    import nltk, because the import takes more than a second.

    Args:
        task: Name or file of the lm-eval task.

    Raises:
        ConfigurationError: The task is unknown.
    """

    def reject_download(*names: object, **_: object) -> None:
        resource = str(names[0]) if names else "data"
        raise ConfigurationError(
            f"the task requires nltk's {resource}, which is not on this machine (downloads are disabled)",
            hint=NLTK_HINT if resource == "punkt_tab" else "Set NLTK_DATA to a folder that contains nltk's data.",
        )

    with lm_eval_environment.offline(), contextlib.ExitStack() as stack:
        if any(b"nltk" in file.read_bytes() for file in _find_file(task).parent.glob("*.py")):
            import nltk

            stack.enter_context(patch_attribute(nltk.data, "path", [*find_bundled_nltk(), *nltk.data.path]))
            stack.enter_context(patch_attribute(nltk, "download", reject_download))
        yield


def run_task(settings: LMEval, engine: Engine, reporter: Reporter, *, requests_only: bool = False) -> ScoresAndSamples:
    """Run a task of lm-eval.

    Args:
        settings: The task and its options.
        engine: The model, or a recorder of requests.
        reporter: Receives the progress.
        requests_only: Build the requests of every document without scoring.

    Returns:
        The task's score by metric (empty for `requests_only`), and a sample for every document.

    Raises:
        ConfigurationError: See `load_task`; also if the task does not report a configured metric.
        InputError: See `load_task`; also if the rows do not fit the task's templates.
    """
    with offline(settings.task), tempfile.TemporaryDirectory() as folder, set_lm_eval_seeds():
        from lm_eval import evaluator

        task = load_task(settings, folder)
        name = str(task.config.task)
        if requests_only:
            _check_metrics(settings, task.aggregation(), task.aggregation())
            task.override_metric(metric_name="bypass")
        task.aggregation().update({metric: _allow_overflow(mean) for metric, mean in task.aggregation().items()})
        try:
            output = evaluator.evaluate(
                lm=build_adapter(engine, reporter),
                task_dict={"tasks": {name: task}},
                limit=settings.max_items,
                bootstrap_iters=0,
                log_samples=True,
                apply_chat_template=settings.chat,
                fewshot_as_multiturn=settings.chat,
            )
        except Exception as error:
            if isinstance(error, TunelineError) or not requests_only:
                raise
            # Requests are built without a model, so the cause is rows that do not fit the task's templates.
            raise _build_row_error(settings, "cannot build requests", error, LAYOUT_HINT) from None
        return _extract_result(output, name, settings, requests_only)


def _allow_overflow(aggregation: Callable[[object], float]) -> Callable[[object], float]:
    """Return an aggregation that gives infinity on overflow, for example for the perplexity of a broken model."""

    def aggregate(values: object) -> float:
        try:
            return aggregation(values)
        except OverflowError:
            return float("inf")

    return aggregate


def load_task(settings: LMEval, folder: str) -> ConfigurableTask:
    """Return the lm-eval task with its data, which is unpacked into `folder`. Call this function within `offline`.

    Raises:
        ConfigurationError: The task is unknown, is a group, executes generated code, or has no local data.
        InputError: The data is invalid or not on this machine.
    """
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    path = _find_file(settings.task)
    content = lm_eval_task_files.load_with_includes(path)
    if not isinstance(content.get("task"), str):
        raise ConfigurationError(
            f"{settings.task} is a group of tasks or has no name in `task`; expected a single task",
            hint="Add an entry for each task of the group.",
        )
    lm_eval_task_files.check_safe(content, path)
    changes: TaskFile = {}
    if settings.data:
        split = content.get("test_split") or content.get("validation_split") or "test"
        builder, options = DATASET_BUILDERS.get(record_files.get_file_format(settings.data), ("json", {}))
        file = Path(settings.data).expanduser().resolve()
        if builder == "json":  # the datasets library supports only some of tuneline's file formats
            file = Path(folder) / "rows.jsonl"
            lines = [json.dumps(record.row) + "\n" for record in record_files.read_records(settings.data)]
            file.write_text("".join(lines), encoding="utf-8")
        changes = {
            **dict.fromkeys(("training_split", "validation_split", "fewshot_split")),
            "test_split": split,
            "dataset_path": builder,
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {split: str(file)}, "cache_dir": folder, **options},
        }
    elif lm_eval_task_files.is_task_file(settings.task):
        lm_eval_task_files.check_local(content, path)
        options = content["dataset_kwargs"]
        files = lm_eval_task_files.resolve_data_paths(options["data_files"], path)
        changes = {"dataset_kwargs": {**options, "data_files": files, "cache_dir": folder}}
    try:
        loaded = TaskManager(include_defaults=False).load([{**load_yaml(path), **changes}])
    except TunelineError:
        raise
    except Exception as error:  # the task's functions raise various exceptions for unsupported rows
        hint = (
            LAYOUT_HINT
            if settings.data
            else "Set data to a local file of the task's documents (JSON lines); downloads are disabled."
        )
        raise _build_row_error(settings, "cannot be loaded", error, hint) from None
    (task,) = loaded["tasks"].values()
    if getattr(task, "UNSAFE_CODE", False):
        raise ConfigurationError(
            f"task {settings.task} executes generated code, which is not supported", hint="Remove the task."
        )
    if settings.shots is not None and task.get_config("num_fewshot") != 0:
        task.set_config(key="num_fewshot", value=settings.shots)
    elif task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=LM_EVAL_SEED)
    return task


@cache
def _find_file(task: str) -> Path:
    """Return the file that defines a task. Raises ConfigurationError for an unknown name."""
    # The text of lm-eval's files is searched, because lm-eval's index parses all 14,000 files.
    if lm_eval_task_files.is_task_file(task):
        return Path(task).expanduser()
    import difflib

    import lm_eval

    pattern, known = re.compile(rb"^task:[ \t]*[\"']?([^\s\"'#]+)", re.MULTILINE), list[str]()
    for path in sorted((Path(lm_eval.__file__).parent / "tasks").rglob("*.yaml")):
        names = {match.decode() for match in pattern.findall(path.read_bytes())}
        if task in names:
            return path
        known += names
    similar = difflib.get_close_matches(task, known, 3)
    hint = (
        f"Choose a task of lm-eval; similar names: {', '.join(similar)}."
        if similar
        else "Run `lm-eval ls tasks` to list all tasks."
    )
    raise ConfigurationError(f"lm-eval has no task {task}", hint=hint)


def _build_row_error(settings: LMEval, problem: str, error: Exception, hint: str) -> InputError:
    source = f" from {settings.data}" if settings.data else ""
    cause = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
    return InputError(f"lm-eval's task {settings.task} {problem}{source}: {cause}", hint=hint)


def _extract_result(output: Mapping[str, Any], name: str, settings: LMEval, requests_only: bool) -> ScoresAndSamples:
    """Return the scores and samples of the chosen filter. Raises ConfigurationError for contradictory settings."""
    samples, results = output["samples"][name], output["results"][name]
    filters = list(dict.fromkeys(sample["filter"] for sample in samples))
    chosen = settings.filter or filters[0]
    if chosen not in filters:
        raise ConfigurationError(
            f"task {settings.task} has no filter {chosen}", hint=f"Choose one of: {', '.join(filters)}."
        )
    samples = sorted((s for s in samples if s["filter"] == chosen), key=lambda sample: int(sample["doc_id"]))
    if requests_only:
        return {}, samples
    scores = {
        metric: float(score) for metric in settings.metrics if (score := results.get(f"{metric},{chosen}")) is not None
    }
    available = [key.partition(",")[0] for key in results if "," in key and "_stderr" not in key]
    _check_metrics(settings, scores, available)
    higher_is_better = output.get("higher_is_better", {}).get(name, {})
    directions = {True: "higher", False: "lower"}
    for metric in settings.metrics:
        direction = directions.get(higher_is_better.get(metric))
        own = lm_eval_metrics.resolve_metric(metric, settings.lower_is_better).better
        if direction and own != direction:
            raise ConfigurationError(
                f"in task {settings.task}, a {direction} {metric} is better; in the configuration, a {own} {metric} "
                "is better",
                hint="Correct the key lower_is_better of the task.",
            )
    return scores, samples


def _check_metrics(settings: LMEval, measured: Iterable[str], available: Iterable[str]) -> None:
    """Raise ConfigurationError if a configured metric is not measured."""
    if missing := sorted(set(settings.metrics) - set(measured)):
        raise ConfigurationError(
            f"task {settings.task} does not measure {', '.join(missing)}",
            hint=f"Choose from: {', '.join(sorted(set(available)))}.",
        )


def build_adapter(engine: Engine, reporter: Reporter) -> TemplateLM:
    """Return an lm-eval model that uses the engine. Texts are encoded as in lm-eval's hf backend."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    tokenizer, max_input_tokens = engine.tokenizer, engine.max_input_tokens or DEFAULT_WINDOW_TOKENS

    class EngineAdapter(TemplateLM):  # type: ignore[misc]
        """Adapter from lm-eval's model interface to the engine."""

        @property
        def eot_token_id(self) -> int:
            return int(tokenizer.eos_token_id)

        @property
        def prefix_token_id(self) -> int:
            return item_encoding.get_start_token_id(tokenizer)

        @property
        def max_length(self) -> int:
            return max_input_tokens

        @property
        def tokenizer_name(self) -> str:
            return "tokenizer"

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
            if add_special_tokens is None:
                return item_encoding.encode_text(tokenizer, string)
            return list(tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"])

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            options = {
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": not add_generation_prompt,
            }
            return str(tokenizer.apply_chat_template(chat_history, tokenize=False, **options))

        def _loglikelihood_tokens(
            self, requests: Sequence[tuple[object, list[int], list[int]]], **_: object
        ) -> list[tuple[float, bool]]:
            continuations = [
                item_encoding.build_continuation(context, after, max_input_tokens) for _, context, after in requests
            ]
            likelihoods = engine.compute_likelihoods(continuations, reporter)
            return [(likelihood.logprob, likelihood.greedy) for likelihood in likelihoods]

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            windows: list[list[Continuation]] = []
            for (text,) in (request.args for request in requests):
                rolled = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, max_input_tokens, 1)
                pairs = map(make_disjoint_window, rolled)
                windows.append(
                    [item_encoding.build_continuation(before, after, max_input_tokens) for before, after in pairs]
                )
            likelihoods = iter(engine.compute_likelihoods(list(chain(*windows)), reporter))
            return [sum(next(likelihoods).logprob for _ in text_windows) for text_windows in windows]

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            return generate_answers(engine, [request.args for request in requests], reporter)

    return EngineAdapter()


def generate_answers(
    engine: Engine, requests: Sequence[tuple[str, Mapping[str, Any]]], reporter: Reporter
) -> list[str]:
    """Return the answers to lm-eval's requests, which consist of a context and its decoding.

    Raises:
        ConfigurationError: The task uses sampling.
    """
    by_decoding: dict[Decoding, list[int]] = {}
    for index, (_, options) in enumerate(requests):
        by_decoding.setdefault(parse_decoding(options), []).append(index)
    answers = [""] * len(requests)
    for decoding, indices in by_decoding.items():
        limit = engine.max_input_tokens or DEFAULT_WINDOW_TOKENS
        contexts = [item_encoding.encode_text(engine.tokenizer, requests[index][0]) for index in indices]
        prompts = item_encoding.fit_prompts(contexts, limit, decoding.max_new_tokens, reporter)
        for index, answer in zip(indices, engine.generate(prompts, decoding, reporter), strict=True):
            answers[index] = answer
    return answers


def parse_decoding(options: Mapping[str, Any]) -> Decoding:
    """Return the decoding for lm-eval's generation options.

    Raises:
        ConfigurationError: `options` enables sampling.
    """
    if options.get("do_sample") and options.get("temperature", 1.0):
        raise ConfigurationError(
            f"the task samples with temperature {options.get('temperature', 1.0)}; expected greedy decoding",
            hint="Choose a greedy variant of the task.",
        )
    until = options.get("until") or []
    stops = [until] if isinstance(until, str) else list(until)
    limits = [options[name] for name in ("max_gen_toks", "max_new_tokens", "max_tokens") if options.get(name)]
    return Decoding(int(limits[0] if limits else DEFAULT_ANSWER_TOKENS), tuple(stop for stop in stops if stop))
