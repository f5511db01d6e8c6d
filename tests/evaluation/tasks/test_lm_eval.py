"""lm-eval tasks on the engines give the scores of lm-eval's own backend."""

from __future__ import annotations

import gzip
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from components.common.answer_metrics import ifeval_checks
from components.common.runtime.errors import ConfigurationError, InputError
from components.common.runtime.reporters import SilentReporter
from components.evaluation.task_interface import Continuation, Scores
from components.evaluation.tasks import item_encoding, lm_eval_metrics, lm_eval_runner
from components.evaluation.tasks.ifeval import IFEval, IFEvalTask
from components.evaluation.tasks.last_word import LastWord, LastWordTask
from components.evaluation.tasks.lm_eval import LMEval, LMEvalTask
from components.evaluation.tasks.multiple_choice import MultipleChoice, MultipleChoiceTask
from components.evaluation.tasks.perplexity import Perplexity, PerplexityTask
from components.evaluation.transformers_engine import TransformersEngine
from tests.evaluation.tasks.fake_engines import BrokenEngine, PlainEngine, ScriptedEngine, build_context
from tests.tiny import tiny_tokenizer

CHOICE_ROWS = [
    {"query": "The fox jumps over the", "choices": ["dog", "list of every module", "file"], "gold": 2},
    {"query": "What does it return?", "choices": ["None", "the function, when the list is empty"], "gold": 0},
    {"query": "Open the", "choices": ["file", "lazy dog"], "gold": 1},
    {"query": "Explain in one", "choices": ["sentence", "quick brown fox", "name"], "gold": 0},
    {"query": "Größe der", "choices": ["Straße", "Tür"], "gold": 0},
]
LETTER_ROWS = [
    {
        "query": f"{row['query']}\nA. {row['choices'][0]}\nB. {row['choices'][1]}\nAnswer:",
        "choices": ["A", "B"],
        "gold": number % 2,
    }
    for number, row in enumerate(CHOICE_ROWS)
]
TEXT_ROWS = [
    {"text": "Open the file, read every line, and close it again."},
    {"text": "Größe und Maß.\n\nZwei  Absätze."},
    {"text": "word " * 200},
]
TASK_HEADER = "dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: rows.jsonl\ntest_split: test\n"
CHOICE_TASK = """task: made_choice
output_type: multiple_choice
doc_to_text: "{{query}}"
doc_to_choice: choices
doc_to_target: gold
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
"""
ROLLING_TASK = """task: made_texts
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
"""
WORD_TASK = """task: made_words
output_type: loglikelihood
doc_to_text: "{{text.split(' ')[:-1] | join(' ')}}"
doc_to_target: "{{' ' + text.split(' ')[-1]}}"
metric_list:
  - metric: perplexity
    aggregation: perplexity
    higher_is_better: false
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
GENERATION_TASK = """task: made_answers
output_type: generate_until
doc_to_text: "Q: {{question}}\\nA:"
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 8
  do_sample: false
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
    ignore_case: true
"""


def write_task_file(folder: Path, text: str, rows: list[dict[str, Any]]) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "made.yaml"
    path.write_text(TASK_HEADER + text)
    return str(path)


def score(engine: Any, settings: LMEval) -> Scores:
    task = LMEvalTask(settings)
    return task.score(engine, task.items(build_context(engine.tokenizer)), build_context(engine.tokenizer), None)


def score_with_lm_eval(engine: PlainEngine, path: str, metrics: list[str]) -> dict[str, float]:
    """Return the scores of lm-eval's hf backend with the same model."""
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    settings = LMEval(task=path)
    with lm_eval_runner.offline(str(path)):
        task = lm_eval_runner.load_task(settings, str(Path(path).parent / "cache"))
        lm = HFLM(pretrained=engine.model, tokenizer=engine.tokenizer, batch_size=2, max_length=engine.max_input_tokens)
        results = evaluator.evaluate(lm=lm, task_dict={"tasks": {"own": task}}, bootstrap_iters=0)
    return {metric: results["results"]["own"][f"{metric},none"] for metric in metrics}


def aggregate(scores: Scores, metric: str, exponential: bool) -> float:
    values, weights = scores.values[metric], scores.weights.get(metric)
    mean = math.fsum(values) / (math.fsum(weights) if weights else len(values))
    return math.exp(mean) if exponential else mean


@pytest.mark.parametrize(
    ("text", "rows", "metrics"),
    [
        (CHOICE_TASK, CHOICE_ROWS, ["acc", "acc_norm"]),
        (CHOICE_TASK, LETTER_ROWS, ["acc", "acc_norm"]),
        (ROLLING_TASK, TEXT_ROWS, ["word_perplexity", "byte_perplexity", "bits_per_byte"]),
        (WORD_TASK, TEXT_ROWS[:2], ["perplexity", "acc"]),
    ],
)
def test_scores_equal_those_of_the_lm_eval_backend(
    engine: PlainEngine, tmp_path: Path, text: str, rows: list[dict[str, Any]], metrics: list[str]
) -> None:
    path = write_task_file(tmp_path, text, rows)
    narrow = PlainEngine(engine.model, engine.tokenizer, max_input_tokens=64)
    scores = score(narrow, LMEval(task=path, metrics=metrics))
    expected = score_with_lm_eval(narrow, path, metrics)
    for metric in metrics:
        assert scores.figures[f"lm_eval_{metric}"] == pytest.approx(expected[metric], rel=1e-5)
        assert aggregate(scores, metric, metric in lm_eval_metrics.EXPONENTIAL_METRICS) == pytest.approx(
            expected[metric], rel=1e-5
        )


def test_letters_of_a_question_cost_one_pass(engine: PlainEngine, tmp_path: Path) -> None:
    path = write_task_file(tmp_path, CHOICE_TASK, LETTER_ROWS)
    batched = TransformersEngine(engine.model, engine.tokenizer, 2048)
    context = build_context(engine.tokenizer)
    tasks = [
        LMEvalTask(LMEval(task=path, metrics=["acc"])),
        MultipleChoiceTask(MultipleChoice(data=str(tmp_path / "rows.jsonl"))),
    ]
    items = [task.items(context) for task in tasks]
    expected = [task.score(engine, own, context, None) for task, own in zip(tasks, items, strict=True)]
    probe = [Continuation([1, token], [False, True]) for token in (2, 3)]
    batched.compute_likelihoods(probe, SilentReporter())  # tests once whether the model supports branches
    rows: list[int] = []
    hook = engine.model.lm_head.register_forward_hook(lambda module, inputs, logits: rows.append(logits.shape[0]))
    scores = [task.score(batched, own, context, None) for task, own in zip(tasks, items, strict=True)]
    hook.remove()
    assert [own.values["acc"] for own in scores] == [own.values["acc"] for own in expected]
    option_tokens = len(item_encoding.encode_pair(engine.tokenizer, LETTER_ROWS[0]["query"], " A")[1])
    assert sum(rows) == 2 * len(LETTER_ROWS) * option_tokens, "no logits but before the tokens of the options"


def test_builtin_tasks_agree_with_lm_eval_per_item(engine: PlainEngine, tmp_path: Path) -> None:
    narrow = PlainEngine(engine.model, engine.tokenizer, max_input_tokens=64)
    context = build_context(engine.tokenizer)

    def score_builtin_task(task: Any) -> tuple[Scores, list[int]]:
        items = task.items(context)
        return task.score(narrow, items, context, None), [row_indices[item.id] for item in items]

    for text, rows, metrics, build_task in (
        (CHOICE_TASK, CHOICE_ROWS, ["acc", "acc_norm"], lambda data: MultipleChoiceTask(MultipleChoice(data=data))),
        (
            ROLLING_TASK,
            TEXT_ROWS,
            ["word_perplexity", "bits_per_byte"],
            lambda data: PerplexityTask(Perplexity(data=data)),
        ),
        (WORD_TASK, TEXT_ROWS[:2], ["acc", "perplexity"], lambda data: LastWordTask(LastWord(data=data))),
    ):
        numbered = [{"id": str(number), **row} for number, row in enumerate(rows)]
        row_indices = {row["id"]: number for number, row in enumerate(numbered)}
        theirs = score(narrow, LMEval(task=write_task_file(tmp_path, text, numbered), metrics=metrics))
        ours, order = score_builtin_task(build_task(str(tmp_path / "rows.jsonl")))
        for metric in metrics:
            assert [ours.values[metric][order.index(index)] for index in range(len(rows))] == pytest.approx(
                theirs.values[metric]
            )
            assert bool(ours.weights.get(metric)) == bool(theirs.weights.get(metric))


@pytest.mark.parametrize(
    ("text", "metric"), [(CHOICE_TASK, "acc"), (ROLLING_TASK, "word_perplexity"), (WORD_TASK, "acc")]
)
def test_nan_likelihood_leaves_document_unmeasured(tmp_path: Path, text: str, metric: str) -> None:
    tokenizer = tiny_tokenizer()
    marked = frozenset(tokenizer("§", add_special_tokens=False)["input_ids"])
    rows = [
        {"query": f"Say{mark}", "choices": ["a", "b"], "gold": 0, "text": f"Say it{mark} twice"}
        for mark in ("", "§", "")
    ]
    scores = score(
        BrokenEngine(tokenizer, marked), LMEval(task=write_task_file(tmp_path, text, rows), metrics=[metric])
    )
    assert [math.isnan(value) for value in scores.values[metric]] == [False, True, False]
    assert math.isnan(scores.figures[f"lm_eval_{metric}"]), (
        "lm-eval's own mean counts the document as one that was measured"
    )


@pytest.mark.parametrize(("text", "metric"), [(ROLLING_TASK, "word_perplexity"), (WORD_TASK, "perplexity")])
def test_perplexity_overflow_is_infinite(tmp_path: Path, text: str, metric: str) -> None:
    engine = BrokenEngine(tiny_tokenizer(), logprob=-1e6)
    scores = score(engine, LMEval(task=write_task_file(tmp_path, text, TEXT_ROWS[:2]), metrics=[metric]))
    assert scores.figures == {f"lm_eval_{metric}": math.inf}
    assert scores.values[metric] == [1e6, 1e6]


def test_nan_likelihood_leaves_last_word_unmeasured(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TEXT_ROWS))
    engine, task = BrokenEngine(tiny_tokenizer()), LastWordTask(LastWord(data=str(tmp_path / "rows.jsonl")))
    scores = task.score(engine, task.items(build_context(engine.tokenizer)), build_context(engine.tokenizer), None)
    assert all(math.isnan(value) for value in scores.values["acc"])


def test_answers_follow_task_decoding(tmp_path: Path) -> None:
    rows = [{"question": "2+2?", "answer": "four"}, {"question": "Capital of Peru?", "answer": "Lima"}]
    engine = ScriptedEngine(tiny_tokenizer(), {"2+2": "five", "Peru": "lima"})
    scores = score(engine, LMEval(task=write_task_file(tmp_path, GENERATION_TASK, rows), metrics=["exact_match"]))
    assert scores.values == {"exact_match": [0.0, 1.0]}
    assert scores.answers == ["five", "lima"]
    assert engine.prompts[-2:] == ["Q: 2+2?\nA:", "Q: Capital of Peru?\nA:"]
    assert (engine.decodings[0].max_new_tokens, engine.decodings[0].stop) == (8, ("\n",))


def test_items_are_lm_eval_documents_with_requests(engine: PlainEngine, tmp_path: Path) -> None:
    path = write_task_file(tmp_path, CHOICE_TASK, CHOICE_ROWS)
    items = LMEvalTask(LMEval(task=path, max_items=3)).items(build_context(engine.tokenizer))
    assert [item.id for item in items] == ["000000", "000001", "000002"]
    assert items[0].prompt == "The fox jumps over the"
    assert items[0].request["requests"][0] == ["The fox jumps over the", " dog"]
    assert engine.requests == [] or all(item.length for item in items)


def test_named_task_reads_local_file(engine: PlainEngine, tmp_path: Path) -> None:
    rows = [
        {"goal": "Open it", "sol1": "pull the door", "sol2": "eat the door", "label": 0},
        {"goal": "Close it", "sol1": "eat it", "sol2": "push the door", "label": 1},
    ]
    (tmp_path / "piqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    scores = score(engine, LMEval(task="piqa", data=str(tmp_path / "piqa.jsonl"), metrics=["acc", "acc_norm"]))
    assert all(value in (0.0, 1.0) for values in scores.values.values() for value in values)
    assert [len(values) for values in scores.values.values()] == [2, 2]


ARC_ROWS = [
    {
        "id": f"i{n}",
        "question": f"Which {n}?",
        "choices": {"text": ["one", "two"], "label": ["A", "B"]},
        "answerKey": "AB"[n % 2],
    }
    for n in range(3)
]


def build_arc_easy_task(data: Path, **settings: Any) -> LMEvalTask:
    return LMEvalTask(LMEval(task="arc_easy", data=str(data), **settings))


def test_json_layouts_give_equal_documents(tmp_path: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in ARC_ROWS)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "a.json").write_text(json.dumps({"data": ARC_ROWS}, indent=1))
    (tmp_path / "b.json").write_text(json.dumps(ARC_ROWS))
    documents = [
        build_arc_easy_task(tmp_path / name).items(build_context(tiny_tokenizer()))
        for name in ("a.jsonl", "a.jsonl.gz", "a.json", "b.json")
    ]
    assert [item.request["requests"][0][0] for item in documents[0]] == [
        f"Question: Which {n}?\nAnswer:" for n in range(3)
    ]
    assert documents[1:] == [documents[0]] * 3


def test_csv_columns_keep_inferred_types(engine: PlainEngine, tmp_path: Path) -> None:
    (tmp_path / "piqa.csv").write_text(
        "goal,sol1,sol2,label\nOpen it,pull the door,eat the door,0\nClose it,eat it,push it,1\n"
    )
    task = LMEvalTask(LMEval(task="piqa", data=str(tmp_path / "piqa.csv")))
    assert [item.reference for item in task.items(build_context(engine.tokenizer))] == ["0", "1"]


def test_rows_of_other_layout_are_refused(tmp_path: Path) -> None:
    (tmp_path / "w.jsonl").write_text('{"query": "Which?", "choices": ["a", "b"]}\n' * 4)
    with pytest.raises(
        InputError, match=r"lm-eval's task arc_easy .*w\.jsonl: UndefinedError: 'question' is undefined"
    ):
        build_arc_easy_task(tmp_path / "w.jsonl").items(build_context(tiny_tokenizer()))
    path = write_task_file(tmp_path, CHOICE_TASK, [{"question": "x", "choices": ["a", "b"], "gold": 0}] * 3)
    with pytest.raises(InputError, match=r"lm-eval's task .*UndefinedError: 'query' is undefined"):
        LMEvalTask(LMEval(task=path)).items(build_context(tiny_tokenizer()))


def test_later_row_of_other_layout_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*ARC_ROWS, {**ARC_ROWS[0], "id": "x", "answerKey": "Q"}])
    )
    with pytest.raises(InputError, match=r"lm-eval's task arc_easy cannot build requests from .*m\.jsonl"):
        build_arc_easy_task(tmp_path / "m.jsonl").items(build_context(tiny_tokenizer()))


def test_more_shots_than_rows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ARC_ROWS))
    with pytest.raises(
        InputError, match=r"arc_easy cannot build requests from .*a\.jsonl: ValueError: Sample larger than population"
    ):
        build_arc_easy_task(tmp_path / "a.jsonl", shots=5).items(build_context(tiny_tokenizer()))


@pytest.mark.parametrize("task", ["humaneval", "mbpp_plus", "humaneval_instruct"])
def test_code_executing_task_is_refused_by_name(task: str) -> None:
    with pytest.raises(ValidationError, match="executes generated code"):
        LMEval(task=task)


@pytest.mark.parametrize("line", ["unsafe_code: true\n", "metric_list:\n  - metric: code_eval\n"])
def test_code_executing_task_file_is_refused(engine: PlainEngine, tmp_path: Path, line: str) -> None:
    path = write_task_file(
        tmp_path, "task: mine\noutput_type: generate_until\ndoc_to_text: text\ndoc_to_target: text\n" + line, TEXT_ROWS
    )
    with pytest.raises(ConfigurationError, match="executes generated code"):
        LMEvalTask(LMEval(task=path)).items(build_context(engine.tokenizer))


def test_task_with_remote_data_is_refused(engine: PlainEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    with pytest.raises(InputError, match="piqa cannot be loaded"):
        LMEvalTask(LMEval(task="piqa")).items(build_context(engine.tokenizer))
    (tmp_path / "far.yaml").write_text("task: far\ndataset_path: org/name\ntest_split: test\n")
    with pytest.raises(ConfigurationError, match="dataset_path is 'org/name'; expected one of json"):
        LMEvalTask(LMEval(task=str(tmp_path / "far.yaml"))).items(build_context(engine.tokenizer))


def test_unknown_task_suggests_similar_names(engine: PlainEngine) -> None:
    with pytest.raises(ConfigurationError, match="lm-eval has no task piqqa") as refused:
        LMEvalTask(LMEval(task="piqqa")).items(build_context(engine.tokenizer))
    assert "piqa" in refused.value.hint


def test_unknown_or_corpus_metric_is_refused(engine: PlainEngine, tmp_path: Path) -> None:
    path = write_task_file(tmp_path, CHOICE_TASK, CHOICE_ROWS)
    with pytest.raises(ConfigurationError, match="does not measure f_score"):
        score(engine, LMEval(task=path, metrics=["f_score"]))
    rows = [{"question": "2+2?", "answer": "four"}, {"question": "Capital of Peru?", "answer": "Lima"}]
    corpus = GENERATION_TASK.partition("metric_list")[0] + "metric_list:\n  - metric: chrf\n"
    with pytest.raises(ConfigurationError, match="chrf over all documents at once"):
        score(
            ScriptedEngine(tiny_tokenizer(), {}), LMEval(task=write_task_file(tmp_path, corpus, rows), metrics=["chrf"])
        )


def test_metric_direction_must_match_task(engine: PlainEngine, tmp_path: Path) -> None:
    path = write_task_file(tmp_path, CHOICE_TASK, CHOICE_ROWS)
    with pytest.raises(ConfigurationError, match="a higher acc is better"):
        score(engine, LMEval(task=path, lower_is_better=["acc"]))


def test_environment_is_restored(engine: PlainEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    LMEvalTask(LMEval(task=write_task_file(tmp_path, CHOICE_TASK, CHOICE_ROWS))).items(build_context(engine.tokenizer))
    assert "HF_DATASETS_OFFLINE" not in os.environ


INSTRUCTION_ROWS = [
    {"key": 1, "prompt": "Say hello without commas.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
    {
        "key": 2,
        "prompt": "Write three sentences, all in lower case.",
        "instruction_id_list": ["length_constraints:number_sentences", "change_case:english_lowercase"],
        "kwargs": [{"num_sentences": 3, "relation": "at least"}, {}],
    },
]


@pytest.mark.parametrize(
    ("row", "answer", "prompt_level", "instructions", "loose"),
    [
        (0, "Hello there", True, [True], True),
        (0, "Hello, there", False, [False], False),
        (0, "Sure, here it is:\nHello there", False, [False], True),
        (1, "one is here. two is here. three is here.", True, [True, True], True),
        (1, "One is here. Two is here. Three is here.", False, [True, False], False),
        (1, "", False, [False, False], False),
    ],
)
def test_instructions_are_checked_as_in_lm_eval(
    row: int, answer: str, prompt_level: bool, instructions: list[bool], loose: bool
) -> None:
    checks = ifeval_checks.check_answer(INSTRUCTION_ROWS[row], answer)
    assert checks["prompt_level_strict_acc"] == prompt_level
    assert checks["inst_level_strict_acc"] == instructions
    assert checks["prompt_level_loose_acc"] == loose


def test_ifeval_counts_prompts_and_instructions(tmp_path: Path) -> None:
    path = tmp_path / "ifeval.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in INSTRUCTION_ROWS))
    engine = ScriptedEngine(tiny_tokenizer(), {"commas": "Hello there", "lower": "One. Two. Three."})
    task = IFEvalTask(IFEval(data=str(path)))
    scores = task.score(engine, task.items(build_context(engine.tokenizer)), build_context(engine.tokenizer), None)
    assert scores.values["prompt_level_strict_acc"] == [1.0, 0.0]
    assert scores.values["inst_level_strict_acc"] == [1.0, 1.0]
    assert scores.weights == {"inst_level_strict_acc": [1.0, 2.0], "inst_level_loose_acc": [1.0, 2.0]}


def test_unknown_instruction_is_refused_with_line(tmp_path: Path) -> None:
    path = tmp_path / "ifeval.jsonl"
    unknown = {**INSTRUCTION_ROWS[0], "key": 3, "instruction_id_list": ["punctuation:no_semicolon"]}
    path.write_text("".join(json.dumps(row) + "\n" for row in [*INSTRUCTION_ROWS, unknown]))
    with pytest.raises(
        InputError, match=r"ifeval\.jsonl:3: the row has the unknown instruction punctuation:no_semicolon"
    ):
        IFEvalTask(IFEval(data=str(path))).items(build_context(tiny_tokenizer()))


@pytest.fixture
def nltk_downloads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Remove nltk's data and lm-eval's IFEval modules; return the list of requested downloads."""
    import nltk

    downloads: list[object] = []
    monkeypatch.setattr(nltk.data, "path", [])
    monkeypatch.setattr(nltk, "download", downloads.append)
    for name in [name for name in sys.modules if name.startswith("lm_eval.tasks.ifeval")]:
        monkeypatch.delitem(sys.modules, name)
    return downloads


def build_ifeval_task(tmp_path: Path) -> LMEvalTask:
    (tmp_path / "ifeval.jsonl").write_text(
        "".join(json.dumps({**row, "kwargs": [{}] * len(row["kwargs"])}) + "\n" for row in INSTRUCTION_ROWS)
    )
    return LMEvalTask(LMEval(task="ifeval", data=str(tmp_path / "ifeval.jsonl"), metrics=["prompt_level_strict_acc"]))


def test_lm_evals_ifeval_reads_local_nltk_data(tmp_path: Path, nltk_downloads: list[object]) -> None:
    assert len(build_ifeval_task(tmp_path).items(build_context(tiny_tokenizer()))) == 2
    assert nltk_downloads == []


def test_nltk_download_is_refused(
    tmp_path: Path, nltk_downloads: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm_eval_runner, "find_bundled_nltk", list)
    with pytest.raises(ConfigurationError, match="requires nltk's punkt_tab, which is not on this machine"):
        build_ifeval_task(tmp_path).items(build_context(tiny_tokenizer()))
    assert nltk_downloads == []


def test_lm_eval_shows_no_progress_bar(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    engine = BrokenEngine(tiny_tokenizer())
    capfd.readouterr()
    score(engine, LMEval(task=write_task_file(tmp_path, CHOICE_TASK, CHOICE_ROWS)))
    output = capfd.readouterr()
    assert (output.out, "it/s" in output.err, "%|" in output.err) == ("", False, False)


def load_ifeval_items(tmp_path: Path, *rows: dict[str, Any]) -> list[Any]:
    (tmp_path / "ifeval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return IFEvalTask(IFEval(data=str(tmp_path / "ifeval.jsonl"))).items(build_context(tiny_tokenizer()))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_words": math.nan, "relation": "at least"}, "has a value in kwargs that is not a JSON value"),
        ({"nonsense": 3}, "has kwargs that length_constraints:number_words does not accept: .*nonsense"),
        ({"num_words": 3, "relation": "about"}, "has kwargs that length_constraints:number_words does not accept"),
        (
            {"num_words": "three", "relation": "at least"},
            "has kwargs that length_constraints:number_words does not accept",
        ),
        ("three", "has 'three' in kwargs; expected an object or null"),
    ],
)
def test_invalid_checker_options_are_refused_with_line(tmp_path: Path, kwargs: object, message: str) -> None:
    row = {
        "id": "c",
        "key": 3,
        "prompt": "Be long.",
        "instruction_id_list": ["length_constraints:number_words"],
        "kwargs": [kwargs],
    }
    with pytest.raises(InputError, match=rf"ifeval\.jsonl:3: the row {message}"):
        load_ifeval_items(tmp_path, *INSTRUCTION_ROWS, row)


def test_null_options_are_ignored(tmp_path: Path) -> None:
    open_row = {
        **INSTRUCTION_ROWS[1],
        "key": 3,
        "kwargs": [{"num_sentences": 3, "relation": "at least", "num_words": None}, None],
    }
    assert [item.id for item in load_ifeval_items(tmp_path, *INSTRUCTION_ROWS, open_row)] == ["1", "2", "3"]


def test_duplicate_key_is_refused_with_both_locations(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"ifeval\.jsonl:3: duplicate key 1, first used at .*ifeval\.jsonl:1"):
        load_ifeval_items(tmp_path, *INSTRUCTION_ROWS, {**INSTRUCTION_ROWS[0], "prompt": "Another."})
