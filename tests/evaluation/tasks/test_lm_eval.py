"""lm-eval's tasks give lm-eval's own scores, whoever computes the log-likelihoods."""

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

from components.common.errors import ConfigurationError, InputError
from components.evaluation.task import Scores
from components.evaluation.tasks import harness, lm_eval_metrics
from components.evaluation.tasks.config import IFEval, LastWord, LMEval, MultipleChoice, Perplexity
from components.evaluation.tasks.ifeval import IFEvalTask, checked
from components.evaluation.tasks.last_word import LastWordTask
from components.evaluation.tasks.lm_eval import LMEvalTask
from components.evaluation.tasks.multiple_choice import MultipleChoiceTask
from components.evaluation.tasks.perplexity import PerplexityTask
from tests.evaluation.tasks.plain_engine import BrokenEngine, PlainEngine, ScriptedEngine, given
from tests.tiny import tiny_tokenizer

CHOICES = [
    {"query": "The fox jumps over the", "choices": ["dog", "list of every module", "file"], "gold": 2},
    {"query": "What does it return?", "choices": ["None", "the function, when the list is empty"], "gold": 0},
    {"query": "Open the", "choices": ["file", "lazy dog"], "gold": 1},
    {"query": "Explain in one", "choices": ["sentence", "quick brown fox", "name"], "gold": 0},
    {"query": "Größe der", "choices": ["Straße", "Tür"], "gold": 0},
]
TEXTS = [
    {"text": "Open the file, read every line, and close it again."},
    {"text": "Größe und Maß.\n\nZwei  Absätze."},
    {"text": "word " * 200},
]
HEAD = "dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: rows.jsonl\ntest_split: test\n"
CHOICE = """task: made_choice
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
ROLLING = """task: made_texts
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
"""
WORD = """task: made_words
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
GENERATED = """task: made_answers
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


def task_file(folder: Path, text: str, rows: list[dict[str, Any]]) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "made.yaml"
    path.write_text(HEAD + text)
    return str(path)


def score(engine: Any, settings: LMEval) -> Scores:
    task = LMEvalTask(settings)
    return task.score(engine, task.items(given(engine.tokenizer)), given(engine.tokenizer), None)


def backend(engine: PlainEngine, path: str, metrics: list[str]) -> dict[str, float]:
    """lm-eval's own hf backend over the same model, and its own scores."""
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    settings = LMEval(task=path)
    with harness.offline():
        task = harness.loaded(settings, str(Path(path).parent / "cache"))
        lm = HFLM(pretrained=engine.model, tokenizer=engine.tokenizer, batch_size=2, max_length=engine.room)
        found = evaluator.evaluate(lm=lm, task_dict={"tasks": {"own": task}}, bootstrap_iters=0)
    return {metric: found["results"]["own"][f"{metric},none"] for metric in metrics}


def mean(scores: Scores, metric: str, exponential: bool) -> float:
    values, weights = scores.values[metric], scores.weights.get(metric)
    found = math.fsum(values) / (math.fsum(weights) if weights else len(values))
    return math.exp(found) if exponential else found


@pytest.mark.parametrize(
    ("text", "rows", "metrics"),
    [
        (CHOICE, CHOICES, ["acc", "acc_norm"]),
        (ROLLING, TEXTS, ["word_perplexity", "byte_perplexity", "bits_per_byte"]),
        (WORD, TEXTS[:2], ["perplexity", "acc"]),
    ],
)
def test_a_score_is_exactly_that_of_lm_evals_own_backend(
    engine: PlainEngine, tmp_path: Path, text: str, rows: list[dict[str, Any]], metrics: list[str]
) -> None:
    path = task_file(tmp_path, text, rows)
    narrow = PlainEngine(engine.model, engine.tokenizer, room=64)
    scores = score(narrow, LMEval(task=path, metrics=metrics))
    own = backend(narrow, path, metrics)
    for metric in metrics:
        assert scores.figures[f"lm_eval_{metric}"] == pytest.approx(own[metric], rel=1e-5)
        assert mean(scores, metric, metric in lm_eval_metrics.EXPONENTIAL) == pytest.approx(own[metric], rel=1e-5)


def test_our_own_tasks_agree_with_lm_evals_item_by_item(engine: PlainEngine, tmp_path: Path) -> None:
    narrow = PlainEngine(engine.model, engine.tokenizer, room=64)
    asked = given(engine.tokenizer)

    def own(task: Any) -> tuple[Scores, list[int]]:
        items = task.items(asked)
        return task.score(narrow, items, asked, None), [places[item.id] for item in items]

    for text, rows, metrics, make in (
        (CHOICE, CHOICES, ["acc", "acc_norm"], lambda data: MultipleChoiceTask(MultipleChoice(data=data))),
        (ROLLING, TEXTS, ["word_perplexity", "bits_per_byte"], lambda data: PerplexityTask(Perplexity(data=data))),
        (WORD, TEXTS[:2], ["acc", "perplexity"], lambda data: LastWordTask(LastWord(data=data))),
    ):
        numbered = [{"id": str(number), **row} for number, row in enumerate(rows)]
        places = {row["id"]: number for number, row in enumerate(numbered)}
        theirs = score(narrow, LMEval(task=task_file(tmp_path, text, numbered), metrics=metrics))
        ours, order = own(make(str(tmp_path / "rows.jsonl")))
        for metric in metrics:
            assert [ours.values[metric][order.index(place)] for place in range(len(rows))] == pytest.approx(theirs.values[metric])
            assert bool(ours.weights.get(metric)) == bool(theirs.weights.get(metric))


@pytest.mark.parametrize(("text", "metric"), [(CHOICE, "acc"), (ROLLING, "word_perplexity"), (WORD, "acc")])
def test_a_document_whose_likelihood_is_no_number_is_unmeasured_and_not_right(tmp_path: Path, text: str, metric: str) -> None:
    tokenizer = tiny_tokenizer()
    marked = frozenset(tokenizer("§", add_special_tokens=False)["input_ids"])
    rows = [{"query": f"Say{mark}", "choices": ["a", "b"], "gold": 0, "text": f"Say it{mark} twice"} for mark in ("", "§", "")]
    scores = score(BrokenEngine(tokenizer, marked), LMEval(task=task_file(tmp_path, text, rows), metrics=[metric]))
    assert [math.isnan(value) for value in scores.values[metric]] == [False, True, False]
    assert math.isnan(scores.figures[f"lm_eval_{metric}"]), "lm-eval's own mean counts the document as one that was measured"


@pytest.mark.parametrize(("text", "metric"), [(ROLLING, "word_perplexity"), (WORD, "perplexity")])
def test_a_perplexity_beyond_a_floats_range_is_infinite(tmp_path: Path, text: str, metric: str) -> None:
    engine = BrokenEngine(tiny_tokenizer(), logprob=-1e6)
    scores = score(engine, LMEval(task=task_file(tmp_path, text, TEXTS[:2]), metrics=[metric]))
    assert scores.figures == {f"lm_eval_{metric}": math.inf}
    assert scores.values[metric] == [1e6, 1e6]


def test_a_last_word_whose_likelihood_is_no_number_is_not_wrong_but_unmeasured(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TEXTS))
    engine, task = BrokenEngine(tiny_tokenizer()), LastWordTask(LastWord(data=str(tmp_path / "rows.jsonl")))
    scores = task.score(engine, task.items(given(engine.tokenizer)), given(engine.tokenizer), None)
    assert all(math.isnan(value) for value in scores.values["acc"])


def test_answers_are_those_that_the_task_asks_for(tmp_path: Path) -> None:
    rows = [{"question": "2+2?", "answer": "four"}, {"question": "Capital of Peru?", "answer": "Lima"}]
    engine = ScriptedEngine(tiny_tokenizer(), {"2+2": "five", "Peru": "lima"})
    scores = score(engine, LMEval(task=task_file(tmp_path, GENERATED, rows), metrics=["exact_match"]))
    assert scores.values == {"exact_match": [0.0, 1.0]}
    assert scores.answers == ["five", "lima"]
    assert engine.prompts[-2:] == ["Q: 2+2?\nA:", "Q: Capital of Peru?\nA:"]
    assert (engine.decodings[0].max_new_tokens, engine.decodings[0].stop) == (8, ("\n",))


def test_items_are_lm_evals_documents_with_all_that_is_asked(engine: PlainEngine, tmp_path: Path) -> None:
    path = task_file(tmp_path, CHOICE, CHOICES)
    items = LMEvalTask(LMEval(task=path, max_items=3)).items(given(engine.tokenizer))
    assert [item.id for item in items] == ["000000", "000001", "000002"]
    assert items[0].prompt == "The fox jumps over the"
    assert items[0].ask["requests"][0] == ["The fox jumps over the", " dog"]
    assert engine.asked == [] or all(item.length for item in items)


def test_a_named_task_reads_a_local_file_in_place_of_its_dataset(engine: PlainEngine, tmp_path: Path) -> None:
    rows = [
        {"goal": "Open it", "sol1": "pull the door", "sol2": "eat the door", "label": 0},
        {"goal": "Close it", "sol1": "eat it", "sol2": "push the door", "label": 1},
    ]
    (tmp_path / "piqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    scores = score(engine, LMEval(task="piqa", data=str(tmp_path / "piqa.jsonl"), metrics=["acc", "acc_norm"]))
    assert all(value in (0.0, 1.0) for values in scores.values.values() for value in values)
    assert [len(values) for values in scores.values.values()] == [2, 2]


ARC = [
    {"id": f"i{n}", "question": f"Which {n}?", "choices": {"text": ["one", "two"], "label": ["A", "B"]}, "answerKey": "AB"[n % 2]}
    for n in range(3)
]


def arc_easy(data: Path, **settings: Any) -> LMEvalTask:
    return LMEvalTask(LMEval(task="arc_easy", data=str(data), **settings))


def test_rows_in_every_layout_of_json_are_the_same_documents(tmp_path: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in ARC)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "a.json").write_text(json.dumps({"data": ARC}, indent=1))
    (tmp_path / "b.json").write_text(json.dumps(ARC))
    found = [arc_easy(tmp_path / name).items(given(tiny_tokenizer())) for name in ("a.jsonl", "a.jsonl.gz", "a.json", "b.json")]
    assert [item.ask["requests"][0][0] for item in found[0]] == [f"Question: Which {n}?\nAnswer:" for n in range(3)]
    assert found[1:] == [found[0]] * 3


def test_a_csv_file_keeps_the_types_that_the_datasets_library_finds(engine: PlainEngine, tmp_path: Path) -> None:
    (tmp_path / "piqa.csv").write_text("goal,sol1,sol2,label\nOpen it,pull the door,eat the door,0\nClose it,eat it,push it,1\n")
    task = LMEvalTask(LMEval(task="piqa", data=str(tmp_path / "piqa.csv")))
    assert [item.reference for item in task.items(given(engine.tokenizer))] == ["0", "1"]


def test_rows_of_another_layout_are_told_with_the_task_and_the_file(tmp_path: Path) -> None:
    (tmp_path / "w.jsonl").write_text('{"query": "Which?", "choices": ["a", "b"]}\n' * 4)
    with pytest.raises(InputError, match=r"lm-eval's task arc_easy .*w\.jsonl: UndefinedError: 'question' is undefined"):
        arc_easy(tmp_path / "w.jsonl").items(given(tiny_tokenizer()))
    path = task_file(tmp_path, CHOICE, [{"question": "x", "choices": ["a", "b"], "gold": 0}] * 3)
    with pytest.raises(InputError, match=r"lm-eval's task .*UndefinedError: 'query' is undefined"):
        LMEvalTask(LMEval(task=path)).items(given(tiny_tokenizer()))


def test_a_row_in_the_middle_that_the_templates_do_not_fit_is_told_too(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*ARC, {**ARC[0], "id": "x", "answerKey": "Q"}]))
    with pytest.raises(InputError, match=r"lm-eval's task arc_easy cannot ask its rows from .*m\.jsonl"):
        arc_easy(tmp_path / "m.jsonl").items(given(tiny_tokenizer()))


def test_more_shots_than_rows_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ARC))
    with pytest.raises(InputError, match=r"arc_easy cannot ask its rows from .*a\.jsonl: ValueError: Sample larger than population"):
        arc_easy(tmp_path / "a.jsonl", shots=5).items(given(tiny_tokenizer()))


@pytest.mark.parametrize("task", ["humaneval", "mbpp_plus", "humaneval_instruct"])
def test_tasks_that_run_what_a_model_wrote_are_refused_by_their_names(task: str) -> None:
    with pytest.raises(ValidationError, match="executes code that the model wrote"):
        LMEval(task=task)


@pytest.mark.parametrize("line", ["unsafe_code: true\n", "metric_list:\n  - metric: code_eval\n"])
def test_a_task_file_that_runs_code_is_refused_by_what_it_says(engine: PlainEngine, tmp_path: Path, line: str) -> None:
    path = task_file(tmp_path, "task: mine\noutput_type: generate_until\ndoc_to_text: text\ndoc_to_target: text\n" + line, TEXTS)
    with pytest.raises(ConfigurationError, match="executes code that the model wrote"):
        LMEvalTask(LMEval(task=path)).items(given(engine.tokenizer))


def test_a_task_whose_data_would_be_downloaded_is_refused(engine: PlainEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    with pytest.raises(InputError, match="piqa cannot be loaded"):
        LMEvalTask(LMEval(task="piqa")).items(given(engine.tokenizer))
    (tmp_path / "far.yaml").write_text("task: far\ndataset_path: org/name\ntest_split: test\n")
    with pytest.raises(ConfigurationError, match="dataset_path is 'org/name', and nothing is downloaded"):
        LMEvalTask(LMEval(task=str(tmp_path / "far.yaml"))).items(given(engine.tokenizer))


def test_a_name_that_is_no_task_is_told_with_near_ones(engine: PlainEngine) -> None:
    with pytest.raises(ConfigurationError, match="lm-eval has no task piqqa") as refused:
        LMEvalTask(LMEval(task="piqqa")).items(given(engine.tokenizer))
    assert "piqa" in refused.value.hint


def test_a_metric_that_the_task_does_not_measure_or_that_has_no_items_is_told(engine: PlainEngine, tmp_path: Path) -> None:
    path = task_file(tmp_path, CHOICE, CHOICES)
    with pytest.raises(ConfigurationError, match="does not measure f_score"):
        score(engine, LMEval(task=path, metrics=["f_score"]))
    rows = [{"question": "2+2?", "answer": "four"}, {"question": "Capital of Peru?", "answer": "Lima"}]
    corpus = GENERATED.partition("metric_list")[0] + "metric_list:\n  - metric: chrf\n"
    with pytest.raises(ConfigurationError, match="chrf over all documents at once"):
        score(ScriptedEngine(tiny_tokenizer(), {}), LMEval(task=task_file(tmp_path, corpus, rows), metrics=["chrf"]))


def test_the_direction_of_a_metric_has_to_be_the_tasks(engine: PlainEngine, tmp_path: Path) -> None:
    path = task_file(tmp_path, CHOICE, CHOICES)
    with pytest.raises(ConfigurationError, match="acc is better when higher"):
        score(engine, LMEval(task=path, lower_is_better=["acc"]))


def test_the_environment_is_left_as_it_was(engine: PlainEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    LMEvalTask(LMEval(task=task_file(tmp_path, CHOICE, CHOICES))).items(given(engine.tokenizer))
    assert "HF_DATASETS_OFFLINE" not in os.environ


INSTRUCTIONS = [
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
def test_instructions_are_checked_as_lm_eval_checks_them(
    row: int, answer: str, prompt_level: bool, instructions: list[bool], loose: bool
) -> None:
    found = checked(INSTRUCTIONS[row], answer)
    assert found["prompt_level_strict_acc"] == prompt_level
    assert found["inst_level_strict_acc"] == instructions
    assert found["prompt_level_loose_acc"] == loose


def test_ifeval_counts_prompts_and_instructions(tmp_path: Path) -> None:
    path = tmp_path / "ifeval.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in INSTRUCTIONS))
    engine = ScriptedEngine(tiny_tokenizer(), {"commas": "Hello there", "lower": "One. Two. Three."})
    task = IFEvalTask(IFEval(data=str(path)))
    scores = task.score(engine, task.items(given(engine.tokenizer)), given(engine.tokenizer), None)
    assert scores.values["prompt_level_strict_acc"] == [1.0, 0.0]
    assert scores.values["inst_level_strict_acc"] == [1.0, 1.0]
    assert scores.weights == {"inst_level_strict_acc": [1.0, 2.0], "inst_level_loose_acc": [1.0, 2.0]}


def test_an_instruction_without_a_checker_is_told_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "ifeval.jsonl"
    unknown = {**INSTRUCTIONS[0], "key": 3, "instruction_id_list": ["punctuation:no_semicolon"]}
    path.write_text("".join(json.dumps(row) + "\n" for row in [*INSTRUCTIONS, unknown]))
    with pytest.raises(InputError, match=r"ifeval\.jsonl:3: the row asks for punctuation:no_semicolon"):
        IFEvalTask(IFEval(data=str(path))).items(given(tiny_tokenizer()))


@pytest.fixture
def fresh_nltk(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """nltk without any data, lm-eval's IFEval not imported yet; what was asked to be downloaded is in the list."""
    import nltk

    asked: list[object] = []
    monkeypatch.setattr(nltk.data, "path", [])
    monkeypatch.setattr(nltk, "download", asked.append)
    for name in [name for name in sys.modules if name.startswith("lm_eval.tasks.ifeval")]:
        monkeypatch.delitem(sys.modules, name)
    return asked


def lm_evals_ifeval(tmp_path: Path) -> LMEvalTask:
    (tmp_path / "ifeval.jsonl").write_text("".join(json.dumps({**row, "kwargs": [{}] * len(row["kwargs"])}) + "\n" for row in INSTRUCTIONS))
    return LMEvalTask(LMEval(task="ifeval", data=str(tmp_path / "ifeval.jsonl"), metrics=["prompt_level_strict_acc"]))


def test_lm_evals_own_ifeval_reads_the_sentence_splitter_of_this_machine(tmp_path: Path, fresh_nltk: list[object]) -> None:
    assert len(lm_evals_ifeval(tmp_path).items(given(tiny_tokenizer()))) == 2
    assert fresh_nltk == []


def test_a_task_that_would_download_data_of_nltk_is_refused(
    tmp_path: Path, fresh_nltk: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "bundled_nltk", list)
    with pytest.raises(ConfigurationError, match="needs nltk's punkt_tab, which is not on this machine"):
        lm_evals_ifeval(tmp_path).items(given(tiny_tokenizer()))
    assert fresh_nltk == []


def test_no_bar_is_drawn_while_lm_eval_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    engine = BrokenEngine(tiny_tokenizer())
    capfd.readouterr()
    score(engine, LMEval(task=task_file(tmp_path, CHOICE, CHOICES)))
    said = capfd.readouterr()
    assert (said.out, "it/s" in said.err, "%|" in said.err) == ("", False, False)


def ifeval_items(tmp_path: Path, *rows: dict[str, Any]) -> list[Any]:
    (tmp_path / "ifeval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return IFEvalTask(IFEval(data=str(tmp_path / "ifeval.jsonl"))).items(given(tiny_tokenizer()))


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"num_words": math.nan, "relation": "at least"}, "has a value in kwargs that JSON does not know"),
        ({"nonsense": 3}, "has kwargs that length_constraints:number_words does not take: .*nonsense"),
        ({"num_words": 3, "relation": "about"}, "has kwargs that length_constraints:number_words does not take"),
        ({"num_words": "three", "relation": "at least"}, "has kwargs that length_constraints:number_words does not take"),
        ("three", "needs an object, or null, in kwargs"),
    ],
)
def test_options_that_a_checker_does_not_take_are_told_by_their_line(tmp_path: Path, kwargs: object, said: str) -> None:
    row = {"id": "c", "key": 3, "prompt": "Be long.", "instruction_id_list": ["length_constraints:number_words"], "kwargs": [kwargs]}
    with pytest.raises(InputError, match=rf"ifeval\.jsonl:3: the row {said}"):
        ifeval_items(tmp_path, *INSTRUCTIONS, row)


def test_options_that_are_null_or_empty_are_taken_as_left_out(tmp_path: Path) -> None:
    open_row = {**INSTRUCTIONS[1], "key": 3, "kwargs": [{"num_sentences": 3, "relation": "at least", "num_words": None}, None]}
    assert [item.id for item in ifeval_items(tmp_path, *INSTRUCTIONS, open_row)] == ["1", "2", "3"]


def test_a_key_that_stands_twice_is_told_with_both_places(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"ifeval\.jsonl:3: the key 1 stands already at .*ifeval\.jsonl:1"):
        ifeval_items(tmp_path, *INSTRUCTIONS, {**INSTRUCTIONS[0], "prompt": "Another."})
