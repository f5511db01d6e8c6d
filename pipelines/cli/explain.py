"""`tuneline explain`: the words of the prompt and the training rows that made an answer more likely."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from components.common.runtime.errors import InputError, UsageError
from pipelines.cli import tables
from pipelines.cli.application import (
    DEFAULT_WORKDIR_PATH,
    ConfigOption,
    JsonOption,
    SetOption,
    TrackingUriOption,
    WorkdirOption,
    app,
    load_config,
    open_workdir,
    print_result,
)
from pipelines.cli.captured_traffic import CaptureFileOption, locked_traffic

if TYPE_CHECKING:
    from pipelines.capture.tombstones import Tombstone
    from pipelines.explanation.explained_answer import Question
    from pipelines.explanation.explanation import Explanation
    from pipelines.explanation.model_reference import CapturedAnswer

DEFAULT_CAPTURE_PATH = Path("capture.yaml")
ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGES_HINT = 'Specify a JSON list such as [{"role": "user", "content": "…"}] that ends with a user turn.'
PAGE_FILENAME, RESULT_FILENAME = "explanation.html", "explanation.json"
SHOWN_WORDS, SHOWN_CHARACTERS = 12, 70
ROW_COLUMNS = (
    "training row",
    "score",
    "share of random rows with at least this score",
    "shared words",
    "source",
    "text",
)

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Folder of a tuned model, source of a base model, or NAME@ALIAS. Default with --from-traffic: the version "
        "that answered.",
    ),
]
PromptOption = Annotated[str | None, typer.Option("--prompt", help="User message.")]
MessagesOption = Annotated[
    Path | None,
    typer.Option("--messages", help="JSON file with a conversation that ends with a user turn.", readable=False),
]
AnswerOption = Annotated[
    str | None,
    typer.Option("--answer", help="Answer to explain. Default: the captured answer, or the model's greedy answer."),
]
FromTrafficOption = Annotated[
    str, typer.Option("--from-traffic", metavar="ID", help="Explain the captured answer with this ID.")
]
TrainingDataOption = Annotated[
    str,
    typer.Option(
        "--training-data",
        metavar="DATASET",
        help="Folder of the dataset that the model was trained on, or `recorded` for the dataset in its manifest. "
        "Default: training rows are not scored.",
    ),
]
UnitOption = Annotated[
    Literal["word", "sentence"], typer.Option("--unit", help="Parts of the prompt to remove one at a time.")
]
RowsOption = Annotated[
    int,
    typer.Option(
        "--rows",
        min=0,
        help="Maximum number of training rows to score: half with similar words, half random. 0: all rows.",
    ),
]
TopOption = Annotated[int, typer.Option("--top", min=1, help="Number of training rows to list.")]
MaxTokensOption = Annotated[
    int, typer.Option("--max-tokens", min=1, help="Maximum length of a generated answer in tokens.")
]
PageFolderOption = Annotated[
    Path | None,
    typer.Option("-o", "--output", help="Folder for explanation.html and explanation.json. Default: no files."),
]


@app.command()
def explain(
    model: ModelArgument = "",
    prompt: PromptOption = None,
    messages: MessagesOption = None,
    answer: AnswerOption = None,
    from_traffic: FromTrafficOption = "",
    training_data: TrainingDataOption = "",
    unit: UnitOption = "word",
    rows: RowsOption = 500,
    top: TopOption = 10,
    max_tokens: MaxTokensOption = 64,
    output: PageFolderOption = None,
    capture: CaptureFileOption = DEFAULT_CAPTURE_PATH,
    config: ConfigOption = None,
    sets: SetOption = [],  # noqa: B006
    tracking_uri: TrackingUriOption = "",
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """Show which words of the prompt, and which training rows, made an answer more likely.

    The scores do not prove causation: only retraining without a row shows its effect.
    """
    inputs = {"--prompt": prompt is not None, "--messages": messages is not None, "--from-traffic": bool(from_traffic)}
    _check_options(model, answer, output, inputs)
    question = read_question(prompt, messages) if not from_traffic else None
    settings = load_config(config, sets)
    from components.common.workspace import artifact_store
    from pipelines.explanation.explanation import ExplanationSettings
    from pipelines.explanation.explanation import explain as explain_answer
    from pipelines.explanation.model_reference import open_reference, open_training_data

    with (
        open_workdir("explain", as_json, workdir, tracking_uri) as (reporter, work),
        artifact_store.keep_paths_in_use(*filter(None, [model, training_data])),
    ):
        captured, erased = _read_traffic(capture, from_traffic)
        if captured is not None:
            question, answer = captured.question, answer if answer is not None else captured.text
        assert question is not None  # one of the options is given
        with open_reference(model, captured, work, reporter) as (loadable, version):
            dataset, mismatch = open_training_data(training_data, loadable, version) if training_data else (None, "")
            explanation = explain_answer(
                loadable,
                version,
                question,
                answer,
                dataset,
                ExplanationSettings(unit, max_tokens, rows, top, settings.seed),
                work,
                settings.data_versioning,
                reporter,
                erased=erased,
            )
    if mismatch:
        explanation.warnings.insert(0, mismatch)
    if captured is not None and captured.facts.get("redactions"):
        explanation.warnings.insert(
            0, "the captured text is redacted; the model saw the original words in place of the masks"
        )
    result = explanation.as_dict()
    if output is not None:
        result |= _write_page(output, explanation, result)
    print_result(result, as_json, lambda: format_explanation(result))


def _check_options(model: str, answer: str | None, output: Path | None, inputs: Mapping[str, bool]) -> None:
    """Check the options that need no file. `inputs` states which of the options for the question are given."""
    given = [name for name, is_given in inputs.items() if is_given]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise UsageError(
            f"expected one of --prompt, --messages and --from-traffic; found {found}", hint='Example: --prompt "Hello".'
        )
    if not model and not inputs["--from-traffic"]:
        raise UsageError("Missing argument 'MODEL'", hint="Specify the folder of a model, a source, or NAME@ALIAS.")
    if answer is not None and not answer.strip():
        raise UsageError("--answer is empty", hint="Specify the answer to explain, or omit the option.")
    if output is not None and output.exists() and not output.is_dir():
        raise UsageError(f"{output} is not a folder", hint="Choose another folder with -o.")


def read_question(prompt: str | None, messages: Path | None) -> Question:
    """Return the conversation of --prompt or --messages.

    Raises:
        UsageError: the prompt is empty.
        InputError: the file cannot be read, or is not a conversation that ends with a turn of the user.
    """
    from pipelines.explanation.explained_answer import Question

    if messages is None:
        if not (prompt or "").strip():
            raise UsageError("--prompt is empty", hint='Specify a message, for example --prompt "Hello".')
        return Question([{"role": "user", "content": prompt}])
    try:
        content = json.loads(messages.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--messages: {messages} cannot be read: {error.strerror}", hint=MESSAGES_HINT) from None
    except ValueError as error:
        raise InputError(f"--messages: {messages} is not JSON: {error}", hint=MESSAGES_HINT) from None
    tools = content.get("tools") if isinstance(content, Mapping) else None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise InputError(f"--messages: {messages}: tools is not a list of JSON objects", hint=MESSAGES_HINT)
    conversation = content.get("messages") if isinstance(content, Mapping) else content
    if not isinstance(conversation, list) or not conversation:
        raise InputError(f"--messages: {messages} contains no list of messages", hint=MESSAGES_HINT)
    for number, one in enumerate(conversation):
        if not isinstance(one, Mapping) or one.get("role") not in ROLES or not isinstance(one.get("content"), str):
            raise InputError(
                f"--messages: {messages}: message {number + 1} is not a message with a role ({', '.join(ROLES)}) and "
                "text content",
                hint=MESSAGES_HINT,
            )
    last = conversation[-1]
    if last["role"] != "user" or not last["content"].strip():
        raise InputError(
            f"--messages: {messages} ends with a message of the role {last['role']}; expected a user message that is "
            "not empty",
            hint=MESSAGES_HINT,
        )
    return Question([dict(one) for one in conversation], tools)


def _read_traffic(capture: Path, response_id: str) -> tuple[CapturedAnswer | None, dict[str, Tombstone] | None]:
    """Return the captured answer, and the erased subjects of the captured traffic; None without a capture file."""
    from pipelines.capture import tombstones, traffic_files
    from pipelines.explanation.model_reference import find_captured_answer

    if response_id:
        with locked_traffic(capture, []) as settings:
            return find_captured_answer(settings, response_id), tombstones.read_tombstones(settings.folder)
    if capture == DEFAULT_CAPTURE_PATH and not capture.exists():
        return None, None
    from pipelines.capture.settings import load_settings

    if not load_settings(capture).bucket:
        return None, tombstones.read_tombstones(load_settings(capture).folder)
    with locked_traffic(capture, [], below=traffic_files.TOMBSTONES) as settings:
        return None, tombstones.read_tombstones(settings.folder)


def _write_page(output: Path, explanation: Explanation, result: dict[str, Any]) -> dict[str, str]:
    from components.common.artifacts import output_paths
    from pipelines.explanation.page import render_explanation

    output.mkdir(parents=True, exist_ok=True)
    facts = {name: value for name, value in result.items() if name != "cost"}  # equal explanations have equal files
    text = json.dumps(facts, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    output_paths.write_file(output / RESULT_FILENAME, text)
    output_paths.write_file(output / PAGE_FILENAME, render_explanation(explanation))
    return {"page": str(output / PAGE_FILENAME)}


def format_explanation(result: Mapping[str, Any]) -> list[str]:
    """Return the result of `explain` as lines: answer, words, deletion figures, training rows, warnings."""
    lines = [f"answer: {result['answer']}", f"log-probability: {result['logprob']:.2f} nats", ""]
    words = sorted(result["tokens"], key=lambda one: -one["score"])[:SHOWN_WORDS]
    columns = (result["unit"], "loss if removed, nats")
    lines += tables.render(tables.build_table(columns, [(one["text"], f"{one['score']:+.2f}") for one in words]))
    effects = [
        (one["method"], f"{one['share']:.0%}", f"{one['removed']:+.2f}", f"{one['kept']:+.2f}")
        for one in result["faithfulness"]
    ]
    if effects:
        lines += [
            "",
            *tables.render(
                tables.build_table(
                    ("ranking", "top share", "loss if removed, nats", "loss if nothing else is kept, nats"), effects
                )
            ),
        ]
    if result["training_rows"]:
        lines += ["", *tables.render(tables.build_table(ROW_COLUMNS, list(_format_rows(result))))]
    if cost := result["cost"]:
        lines += [
            "",
            f"{cost['candidates']:,} of {cost['total']:,} rows scored; gradients of {cost['computed']:,} computed in "
            f"{cost['seconds']:.1f} s, {cost['cached']:,} cached; estimated peak memory {cost['memory_bytes'] / 1e9:.1f} GB",
        ]
    lines += [f"! {warning}" for warning in result["warnings"]]
    return [*lines, *([f"page: {result['page']}"] if "page" in result else [])]


def _format_rows(result: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for one in result["training_rows"]:
        text = " ".join(one["text"].split())
        yield (
            one["id"] + (" (subject erased)" if one["erased"] else ""),
            f"{one['score']:+.3f}",
            "unknown" if one["random_share"] is None else f"{one['random_share']:.1%}",
            f"{one['lexical']:.2f}",
            one["line"] or one["source"],
            text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…",
        )
