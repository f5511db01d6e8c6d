"""Quality scores of rows. Fast tier: small files and models, in-process."""

import json
import math
import random

import pytest

from components.common.runtime.errors import ArtifactDamagedError, ConfigurationError, EngineMissingError, InputError
from components.common.runtime.reporters import SilentReporter
from components.data_curation.config import DataCurationConfig
from components.data_curation.quality_scoring import perplexity
from components.data_curation.quality_scoring.row_scoring import QualityScores, build_scorers
from components.data_curation.quality_scoring.scoring_inputs import ScoringInputs, list_scoring_inputs
from components.data_curation.stage import curate, list_sources
from tests.tiny import tiny_model

SUBJECTS = [
    "The manager",
    "Our auditor",
    "A new customer",
    "The server",
    "Every engineer",
    "The nurse",
    "A small company",
    "The old bridge",
]
VERBS = ["explains", "reviews", "needs", "repairs", "describes", "checks", "replaces", "measures"]
OBJECTS = [
    "the yearly report",
    "a broken pump",
    "the safety rules",
    "an open invoice",
    "the new schedule",
    "a long contract",
]
ENDINGS = [
    "before the meeting starts",
    "because the deadline is near",
    "when the customer asks for it",
    "after a careful test",
]


class NotedReporter(SilentReporter):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


def build_text(generator, number):
    parts = [
        f"{generator.choice(SUBJECTS)} {generator.choice(VERBS)} {generator.choice(OBJECTS)} {generator.choice(ENDINGS)}."
        for _ in range(4)
    ]
    return f"{' '.join(parts)} The case has the number {number}."


def shuffle_words(generator, text):
    words = text.split()
    generator.shuffle(words)
    return " ".join(words)


@pytest.fixture
def examples(tmp_path):
    """Write 60 good texts and the same number of texts with shuffled words."""
    generator = random.Random(1)
    texts = [build_text(generator, number) for number in range(120)]
    (tmp_path / "good.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:60]))
    shuffled = [shuffle_words(generator, text) for text in texts[60:]]
    (tmp_path / "bad.txt").write_text("".join(f"{text}\n" for text in shuffled))
    return {"good": [str(tmp_path / "good.jsonl")], "bad": [str(tmp_path / "bad.txt")]}


@pytest.fixture
def texts(write_rows):
    """Write 40 new texts and 20 with shuffled words; their ids are good-N and bad-N."""
    generator = random.Random(2)
    rows = [{"id": f"good-{number}", "text": build_text(generator, 1000 + number)} for number in range(40)]
    rows += [
        {"id": f"bad-{number}", "text": shuffle_words(generator, build_text(generator, 2000 + number))}
        for number in range(20)
    ]
    return write_rows(rows)


@pytest.fixture
def curate_scored(tmp_path):
    """Return the function that curates a file with quality scores into tmp_path/out, or another folder."""

    def run(path, out="out", reporter=None, **scorers):
        config = DataCurationConfig(sources=[str(path)], quality_scores=scorers)
        return curate(
            list_sources(config.sources, tmp_path),
            tmp_path / out,
            config,
            seed=1,
            reporter=reporter or SilentReporter(),
            scoring=list_scoring_inputs(config.quality_scores, tmp_path),
        )

    return run


def read_kept(dataset, read_rows):
    return {row["id"]: row for split in ("train", "validation", "test") for row in read_rows(dataset, split)}


def read_scores(dataset, read_rows, scorer):
    rows = read_kept(dataset, read_rows).values()
    return {row["id"]: json.loads(row["meta"])["quality_scores"][scorer] for row in rows}


def test_classifier_drops_bad_rows_with_their_scores(texts, examples, curate_scored, read_rows):
    dataset = curate_scored(texts, classifier={**examples, "min_score": 0.5})
    summary = dataset.manifest.summary
    rejected = [row for row in read_rows(dataset, "rejected") if row["reason"] == "low_quality_score"]
    assert summary["quality_scores"]["classifier"]["auc"] > 0.9
    assert {row["id"].split("-")[0] for row in rejected} == {"bad"}
    assert len(rejected) >= 18
    for row in rejected:
        score = float(row["detail"].removeprefix("classifier score ").removesuffix("; expected 0.5 or more"))
        assert 0 <= score < 0.5
    counts = summary["rows"]
    assert counts["in"] == counts["kept"] + sum(counts["rejected"].values()) + counts["quarantined"] == 60
    assert counts["rejected"]["low_quality_score"] == summary["quality_scores"]["classifier"]["rejected"]
    assert min(read_scores(dataset, read_rows, "classifier").values()) >= 0.5


def test_without_a_threshold_rows_are_only_scored(texts, examples, curate_scored, read_rows):
    dataset = curate_scored(texts, classifier=examples)
    assert "low_quality_score" not in dataset.manifest.summary["rows"]["rejected"]
    scores = read_scores(dataset, read_rows, "classifier")
    assert len(scores) == 60
    assert sum(scores[f"bad-{number}"] < 0.5 for number in range(20)) >= 18
    assert all(score == round(score, 4) for score in scores.values())


def test_equal_inputs_give_equal_bytes(texts, examples, curate_scored):
    first, second = (curate_scored(texts, out, classifier={**examples, "min_score": 0.4}) for out in ("one", "two"))
    assert first.sha256 == second.sha256
    inputs = [(one.uri, one.settings) for one in first.manifest.inputs if one.kind == "quality_examples"]
    assert inputs == [("good.jsonl", {"label": "good"}), ("bad.txt", {"label": "bad"})]


def test_changed_example_is_another_dataset(texts, examples, curate_scored, tmp_path):
    first = curate_scored(texts, "one", classifier=examples)
    with (tmp_path / "bad.txt").open("a") as file:
        file.write("zebra of the the an quickly because\n")
    assert curate_scored(texts, "two", classifier=examples).sha256 != first.sha256


def test_report_shows_the_histogram_and_the_threshold(texts, examples, curate_scored):
    dataset = curate_scored(texts, classifier={**examples, "min_score": 0.35})
    page = (dataset.path / "report.html").read_text(encoding="utf-8")
    section = page[page.index("<h2>Quality scores</h2>") :]
    assert "Orange: rejected, because the score is below 0.35." in section
    assert "0.3–0.35" in section
    assert ">auc</div>" in section


def test_few_examples_are_an_error_before_the_rows_are_read(texts, examples, curate_scored, tmp_path):
    (tmp_path / "bad.txt").write_text("one bad row\none bad row\n" + "".join(f"bad {n} row\n" for n in range(18)))
    with pytest.raises(InputError, match=r"classifier\.bad contains 19 different rows; expected at least 20"):
        curate_scored(texts, classifier=examples)
    assert not (tmp_path / "out" / ".engine").exists()


def test_unreadable_examples_are_counted(texts, examples, curate_scored, tmp_path):
    with (tmp_path / "good.jsonl").open("a") as file:
        file.write('{"text": \n')
    reporter = NotedReporter()
    curate_scored(texts, reporter=reporter, classifier=examples)
    assert any("1 of the good examples is unreadable, the first good.jsonl:61" in note for note in reporter.notes)


def test_examples_that_do_not_differ_give_a_warning(texts, curate_scored, tmp_path):
    generator = random.Random(3)
    for label in ("good", "bad"):
        (tmp_path / f"{label}.txt").write_text("".join(f"{build_text(generator, n)}\n" for n in range(60)))
    paths = {label: [str(tmp_path / f"{label}.txt")] for label in ("good", "bad")}
    reporter = NotedReporter()
    dataset = curate_scored(texts, reporter=reporter, classifier=paths)
    assert dataset.manifest.summary["quality_scores"]["classifier"]["auc"] < 0.6
    assert any("hardly separates good from bad examples" in note for note in reporter.notes)
    assert "hardly separates good from bad examples" in (dataset.path / "report.html").read_text(encoding="utf-8")


def test_threshold_that_no_row_reaches_is_an_error(texts, examples, curate_scored):
    with pytest.raises(InputError, match="no row is kept: 60 rejected as low_quality_score"):
        curate_scored(texts, classifier={**examples, "min_score": 1})


def test_missing_examples_are_an_error_of_the_configuration(tmp_path, examples):
    config = DataCurationConfig(quality_scores={"classifier": {**examples, "bad": ["gone.txt"]}})
    with pytest.raises(ConfigurationError, match=r"data_curation\.quality_scores\.classifier\.bad: 'gone\.txt'"):
        list_scoring_inputs(config.quality_scores, tmp_path)


def test_value_of_a_record_under_the_key_of_the_scores_is_kept():
    scores = QualityScores({"classifier": [0.5, float("nan")]})
    meta = {"quality_scores": "high", "source_quality_scores": 1}
    assert scores.add_to_meta(meta, 0) == {
        "source_quality_scores": 1,
        "source_quality_scores_2": "high",
        "quality_scores": {"classifier": 0.5},
    }
    assert scores.add_to_meta(meta, 1) == meta


def test_settings_without_scorers_keep_the_configuration_of_earlier_datasets():
    assert "quality_scores" not in DataCurationConfig().model_dump()


# --- perplexity -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Write the tiny model once: its loading takes most of the time of a test."""
    return tiny_model(tmp_path_factory.mktemp("quality") / "tiny")


def compute_perplexity(folder, text, max_tokens):
    """Compute the perplexity token by token, without batches and padding."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, loaded = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    tokens = [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"][:max_tokens]]
    losses = []
    for position in range(1, len(tokens)):
        with torch.no_grad():
            logits = loaded(torch.tensor([tokens[:position]])).logits[0, -1]
        losses.append(-float(torch.log_softmax(logits.double(), dim=-1)[tokens[position]]))
    return math.exp(sum(losses) / len(losses))


@pytest.mark.parametrize("batch_tokens", [1, 2048])
def test_perplexity_equals_an_independent_computation(texts, model, curate_scored, read_rows, batch_tokens):
    settings = {"enabled": True, "model": str(model), "max_tokens": 20, "batch_tokens": batch_tokens}
    dataset = curate_scored(texts, perplexity=settings)
    scores, rows = read_scores(dataset, read_rows, "perplexity"), read_kept(dataset, read_rows)
    assert len(scores) == 60
    for id_ in ("good-3", "bad-7"):
        expected = compute_perplexity(model, rows[id_]["text"], 20)
        assert scores[id_] == pytest.approx(expected, rel=1e-4)
    assert dataset.manifest.summary["quality_scores"]["perplexity"]["truncated_rows"] == 60


def test_padding_does_not_change_the_perplexity(model):
    from components.common.models import model_loading

    base = model_loading.resolve_base_model(str(model))
    loaded = model_loading.load_model(model_loading.LoadableModel(base.sha256, base, base.path, None, None))
    tokenizer = model_loading.load_tokenizer(base.path)
    sequences = [perplexity.encode_text(tokenizer, text) for text in ("Open the file.", "The fox jumps. " * 9, "a")]
    together = perplexity.compute_losses(loaded, sequences)
    assert together == pytest.approx([perplexity.compute_losses(loaded, [one])[0] for one in sequences], rel=1e-5)


def test_rows_of_high_perplexity_are_dropped_and_the_model_is_an_input(texts, model, curate_scored, read_rows):
    settings = {"enabled": True, "model": str(model), "max_tokens": 20}
    scores = read_scores(curate_scored(texts, "all", perplexity=settings), read_rows, "perplexity")
    limit = sorted(scores.values())[39]
    dataset = curate_scored(texts, perplexity={**settings, "max_score": limit})
    assert read_scores(dataset, read_rows, "perplexity") == {id_: x for id_, x in scores.items() if x <= limit}
    rejected = {row["id"]: row["detail"] for row in read_rows(dataset, "rejected")}
    assert rejected == {
        id_: f"perplexity score {x:.10g}; expected {limit:.10g} or less" for id_, x in scores.items() if x > limit
    }
    assert [(one.kind, one.uri) for one in dataset.manifest.inputs][1:] == [("scoring_model", "tiny")]
    page = (dataset.path / "report.html").read_text(encoding="utf-8")
    assert f"Orange: rejected, because the score is above {limit:.10g}." in page


def test_changed_model_is_refused(texts, model, curate_scored, tmp_path):
    settings = DataCurationConfig(quality_scores={"perplexity": {"enabled": True, "model": str(model)}})
    inputs = list_scoring_inputs(settings.quality_scores, tmp_path)
    changed = ScoringInputs(model=inputs.model.model_copy(update={"content_sha256": "0" * 64}))
    with pytest.raises(ArtifactDamagedError, match="expected 000000000000"):
        build_scorers(settings, changed, 1, SilentReporter())


def test_missing_torch_is_refused_before_any_work(monkeypatch, tmp_path):
    monkeypatch.setattr(perplexity.importlib.util, "find_spec", lambda name: None if name == "torch" else name)
    config = DataCurationConfig(quality_scores={"perplexity": {"enabled": True, "model": "tiny"}})
    with pytest.raises(EngineMissingError, match=r"perplexity\.enabled is true, but torch is not installed") as error:
        list_scoring_inputs(config.quality_scores, tmp_path)
    assert "tuneline[models]" in error.value.hint


def test_missing_model_is_an_error_of_the_configuration(tmp_path):
    config = DataCurationConfig(quality_scores={"perplexity": {"enabled": True, "model": str(tmp_path / "gone")}})
    with pytest.raises(ConfigurationError, match="gone"):
        list_scoring_inputs(config.quality_scores, tmp_path)
