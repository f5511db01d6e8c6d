"""Decontamination: rows that share text with evaluation items are rejected."""

import gzip
import itertools
import json
import pickle
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import ipc

from components.common.runtime.errors import ConfigurationError, InputError
from components.common.runtime.reporters import SilentReporter
from components.data_curation import chunk_worker, prepared_chunks
from components.data_curation.config import DataCurationConfig
from components.data_curation.filters.decontamination import (
    EvaluationIndex,
    find_contaminating_set,
)
from components.data_curation.filters.reject_reasons import CONTAMINATED
from components.data_curation.normalized_words import normalize_words
from components.data_curation.reading.raw_records import Record
from components.data_curation.reading.source_files import list_evaluation_sets, list_sources
from components.data_curation.stage import preview_curation

QUESTION = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many in all?"
)
OTHER = "A robe takes two bolts of blue fibre and half that much white fibre. How many bolts in total does it take, asked the tailor?"


class RecordingReporter(SilentReporter):
    """Records the notes."""

    def __init__(self):
        self.texts = []

    def note(self, text):
        self.texts.append(text)


def make_unique_text(number):
    """Return a text of twenty words that is unique to the number."""
    return " ".join(f"term{number}of{i}" for i in range(20))


@pytest.fixture
def build_index(write_rows, tmp_path):
    """Return the function that builds an index over records, which it writes into one file."""

    def build(records, name="bench.jsonl", reporter=None, **options):
        config = DataCurationConfig(decontamination={"sets": [str(write_rows(records, name))], **options})
        return EvaluationIndex.build(
            list_evaluation_sets(config.decontamination.sets, tmp_path), config, reporter or SilentReporter()
        )

    return build


@pytest.mark.parametrize(
    "text",
    [
        QUESTION,
        QUESTION.upper(),
        QUESTION.replace(",", " —").replace(" ", "\n"),
        f"Please solve this. {QUESTION} Thank you very much, it is for my daughter.",
        "Then " + " ".join(QUESTION.split()[3:16]),  # thirteen words of the item
    ],
)
def test_row_with_item_text_is_rejected_and_names_the_item(build_index, text):
    rejection = build_index(
        [{"question": make_unique_text(1)}, {"question": QUESTION, "answer": "72"}]
    ).find_contamination(f"User said:\n{text}\nIt is 72.")
    assert rejection is not None
    assert rejection.reason == CONTAMINATED.name
    assert "words with bench.jsonl:2: " in rejection.detail
    assert find_contaminating_set(rejection) == "bench.jsonl"


def test_detail_counts_words_and_ngrams(build_index):
    rejection = build_index([{"question": QUESTION}]).find_contamination(
        "We ask: " + " ".join(QUESTION.split()[:15]) + " and nothing more"
    )
    total = len(normalize_words(QUESTION).split()) - 12
    assert rejection == CONTAMINATED.reject(f"shares 15 words with bench.jsonl:1: 3 of {total} n-grams of its question")


def test_twelve_words_of_a_long_item_are_not_contamination(build_index):
    assert (
        build_index([{"question": QUESTION}]).find_contamination("So " + " ".join(QUESTION.split()[:12]) + " or so")
        is None
    )


@pytest.mark.parametrize(
    "record",
    [
        {"turns": [make_unique_text(1), QUESTION]},
        {"choices": [{"text": QUESTION}]},
        {"query": make_unique_text(2), "gold": QUESTION},
    ],
)
def test_item_text_in_any_field_is_indexed(build_index, record):
    assert build_index([record]).find_contamination(QUESTION) is not None


def test_ngrams_do_not_cross_item_fields(build_index):
    first, second = QUESTION.split()[:9], OTHER.split()[:9]
    index = build_index([{"question": " ".join(first), "answer": " ".join(second)}], shortest=10)
    assert index.sets["bench.jsonl"]["unsearchable"] == 0
    assert index.find_contamination(" ".join(first + second)) is None


def test_short_item_matches_only_as_a_whole(build_index):
    index = build_index([{"question": "How can I improve my time management skills?"}])
    assert index.find_contamination("So: how can I improve my time management skills? Plan.").detail == (
        "shares 8 words with bench.jsonl:1: all of its question"
    )
    assert index.find_contamination("How can I improve my time management at work?") is None


def test_short_question_with_a_long_answer_is_found(build_index):
    index = build_index([{"question": "What is fifteen more than a quarter of 48?", "answer": make_unique_text(7)}])
    assert index.find_contamination("Tell me: what is fifteen more than a quarter of 48?") is not None


def test_items_with_too_few_words_are_counted_and_reported(build_index):
    reporter = RecordingReporter()
    index = build_index([{"question": "Who are you?"}, {"question": QUESTION}], reporter=reporter)
    assert index.sets == {"bench.jsonl": {"items": 2, "unsearchable": 1, "unreadable": 0}}
    assert reporter.texts == [
        "evaluation set bench.jsonl: the question of 1 of 2 items cannot be searched for: it is too short, is a common "
        "phrase, or contains only numbers and single letters"
    ]
    assert index.find_contamination("Who are you?") is None


SHORT = "Which gas do plants absorb?"
PASSAGE = make_unique_text(9)
OPTIONS = ["oxygen that plants release during the whole day", "carbon dioxide", "helium", "neon"]
LETTERED = "A. oxygen that plants release during the whole day\nB. carbon dioxide\nC. helium\nD. neon"


@pytest.mark.parametrize(
    "item",
    [
        pytest.param({"query": f"Question: {SHORT}", "choices": OPTIONS, "gold": 1}, id="labelled"),
        pytest.param({"choices": OPTIONS, "query": f"Question: {SHORT}\nChoices:\n{LETTERED}\nAnswer:"}, id="lettered"),
        pytest.param({"query": f"{SHORT} (A) oxygen (B) carbon dioxide", "choices": ["A", "B"]}, id="letters-in-line"),
        pytest.param(
            {"query": f"Passage: {PASSAGE}\nQuestion: {SHORT}\n", "choices": ["no", "yes"]}, id="passage-label"
        ),
        pytest.param({"passage": PASSAGE, "question": SHORT, "answer": True}, id="passage-field"),
        pytest.param({"context": f"Question: {SHORT}\nAnswer:", "answer": "CO2", "aliases": [PASSAGE]}, id="context"),
        pytest.param(
            {"id": "Mercury_7", "question": {"stem": SHORT, "choices": [{"text": "neon", "label": "A"}]}}, id="stem"
        ),
        pytest.param({"Type": "Adversarial items", "Question": SHORT, "Source": f"https://x.org/{PASSAGE}"}, id="csv"),
        pytest.param({"question_id": 1, "category": "plant science", "turns": [SHORT, "Why?"]}, id="turns"),
        pytest.param({"premise": SHORT, "question": "cause", "choice1": "x"}, id="premise"),
        pytest.param({"instruction": SHORT, "input": "A. oxygen B. carbon dioxide"}, id="options-as-input"),
        pytest.param(
            {"instruction": "Answer the question.", "input": f"Passage: {PASSAGE}\nQuestion: {SHORT}"},
            id="labelled-input",
        ),
        pytest.param({"column 1": SHORT, "column 2": "neon"}, id="unknown-fields"),
        pytest.param({"query": f"{SHORT} A. oxygen B. carbon dioxide C. neon"}, id="options-in-line"),
        pytest.param({"query": f"{SHORT}\nA) oxygen B) carbon dioxide"}, id="options-in-next-line"),
        pytest.param({"query": f"Question: {SHORT} 1. oxygen 2. neon Answer: 2"}, id="numbers-in-line"),
        pytest.param(
            {
                "messages": [
                    {"role": "system", "content": "You are a helpful assistant."},
                    {"role": "user", "content": "Are you an expert on plants?"},
                    {"role": "assistant", "content": "Yes, I am."},
                    {"role": "user", "content": [{"type": "text", "text": SHORT}]},
                ]
            },
            id="messages",
        ),
        pytest.param(
            {
                "system": "You are a helpful assistant.",
                "conversations": [{"from": "human", "value": SHORT}, {"from": "gpt", "value": "It is neon."}],
            },
            id="sharegpt",
        ),
    ],
)
@pytest.mark.parametrize(
    "text",
    [
        SHORT,
        f"{SHORT}\ncarbon dioxide",
        f"Question: {SHORT}\n1) carbon dioxide\n2) neon\nAnswer: 1",
        f"Take this one. {SHORT.upper()} (a) neon (b) carbon dioxide",
        f'Answer "{SHORT}" in one word.',
        f"Answer '{SHORT}'",
        f"Answer ‘{SHORT[:-1]}’ now",
        f"Tweet — {SHORT}",
        f"Tweet – {SHORT[:-1]} – 5 likes",
    ],
)
def test_short_question_is_found_in_every_form_of_item_and_row(build_index, item, text):
    index = build_index([item])
    assert index.sets["bench.jsonl"]["unsearchable"] == 0
    assert index.find_contamination(text) == CONTAMINATED.reject(
        "shares 5 words with bench.jsonl:1: all of its question"
    )


@pytest.mark.parametrize(
    ("question", "text"),
    [
        ("ما هي عاصمة مصر الحالية؟", "ما هي عاصمة مصر الحالية؟ القاهرة"),
        ("ما هي عاصمة مصر الحالية", "سؤال، ما هي عاصمة مصر الحالية؛ القاهرة"),
        ("भारत की राजधानी क्या है।", "नमस्ते। भारत की राजधानी क्या है। दिल्ली"),
        ("¿Cuál es la capital de Francia?", "Hola ¿Cuál es la capital de Francia? París"),
        ("¡Dime cuál es la capital!", "Hola ¡Dime cuál es la capital! París"),
    ],
)
def test_punctuation_of_other_languages_ends_a_sentence(build_index, question, text):
    options = {"shortest": 13}  # each vowel sign of Hindi ends a word
    assert build_index([{"question": question}], **options).find_contamination(text) is not None


def test_apostrophe_within_a_word_does_not_end_a_sentence(build_index):
    index = build_index([{"question": "t plants absorb more gas"}])
    assert index.find_contamination("Why don't plants absorb more gas?") is None
    assert index.find_contamination("Why don’t plants absorb more gas?") is None


SYSTEM_PROMPT = "You are a helpful assistant."
INSTRUCTION = "Classify the sentiment of the tweet."


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (
            {"messages": [{"role": "system", "content": SYSTEM_PROMPT * 3}, {"role": "user", "content": SHORT}]},
            SYSTEM_PROMPT * 3,
        ),
        (
            {"conversations": [{"from": "System", "value": SYSTEM_PROMPT}, {"from": "human", "value": SHORT}]},
            SYSTEM_PROMPT,
        ),
        ({"system_prompt": SYSTEM_PROMPT * 3, "question": SHORT}, SYSTEM_PROMPT * 3),
        ({"instruction": INSTRUCTION, "input": "My day was great"}, f"{INSTRUCTION}\n\nI hate rain"),
        ({"instruction": INSTRUCTION * 3, "input": "My day"}, f"{INSTRUCTION * 3}\n\nI hate rain"),
        ({"instruction": INSTRUCTION * 3, "input": QUESTION}, f"{INSTRUCTION * 3}\n\nI hate rain"),
    ],
)
def test_system_prompt_and_generic_instruction_are_not_contamination(build_index, record, text):
    index = build_index([record])
    assert index.sets["bench.jsonl"]["unsearchable"] == 0
    assert index.find_contamination(text) is None


@pytest.mark.parametrize("instruction", [INSTRUCTION, INSTRUCTION * 3])
@pytest.mark.parametrize("given", ["My day", "My day was great", QUESTION])
def test_instruction_with_input_is_found(build_index, instruction, given):
    rejection = build_index([{"instruction": instruction, "input": given}]).find_contamination(
        f"{instruction}\n\n{given}\nPositive"
    )
    assert rejection.detail.endswith("of its question")


@pytest.mark.parametrize(
    "question", ["Which of the following is true?", "Which of the following is true of this plant cell?"]
)
def test_short_question_that_several_items_share_is_a_common_phrase(build_index, question):
    items = [{"question": question, "choices": [make_unique_text(i)]} for i in range(3)]
    index = build_index([*items, {"question": SHORT}])
    assert index.sets["bench.jsonl"] == {"items": 4, "unsearchable": 3, "unreadable": 0}
    assert index.find_contamination(question) is None
    assert index.find_contamination(SHORT) is not None
    assert index.find_contamination(make_unique_text(2)) is not None
    assert build_index(items, ignore_common=3).find_contamination(question) is not None


def test_short_question_of_a_pair_of_items_is_found(build_index):
    index = build_index([{"question": SHORT, "choices": [text]} for text in OPTIONS[:2]])
    assert index.sets["bench.jsonl"]["unsearchable"] == 0
    assert index.find_contamination(SHORT) is not None


def test_sets_with_equal_file_names_are_told_apart_by_their_folders(write_rows, tmp_path):
    for folder, question in ((".", PASSAGE), ("arc", QUESTION), ("tqa/test", OTHER), ("tqa/dev", SHORT)):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        write_rows([{"question": question}], f"{folder}/test.jsonl")
    write_rows([{"question": make_unique_text(1)}], "other.jsonl")
    config = DataCurationConfig(decontamination={"sets": ["."]})
    index = EvaluationIndex.build(list_evaluation_sets(["."], tmp_path), config, SilentReporter())
    assert set(index.sets) == {"other.jsonl", "test.jsonl", "arc/test.jsonl", "test/test.jsonl", "dev/test.jsonl"}
    assert find_contaminating_set(index.find_contamination(OTHER)) == "test/test.jsonl"


@pytest.mark.parametrize("options", ["A. yellow B. red", "a) yellow b) red", "1. yellow 2. red", "(A) yellow (B) red"])
def test_sentence_that_an_option_completes_is_found_with_its_options(build_index, options):
    text = f"The color of ripe bananas is {options}"
    index = build_index([{"query": text}])
    assert index.sets["bench.jsonl"]["unsearchable"] == 0
    assert index.find_contamination(text).detail.endswith("all of its question")


def test_question_of_several_short_sentences_is_found(build_index):
    index = build_index([{"question": "I have 3 pears. How many?"}])
    assert index.find_contamination("Hello. I have 3 pears! How many? Five.") is not None


@pytest.mark.parametrize("text", [f"Tell me {SHORT}", "Which gas do plants absorb at night?", "carbon dioxide\nneon"])
def test_short_texts_within_a_sentence_and_short_options_are_not_contamination(build_index, text):
    assert build_index([{"question": SHORT, "choices": OPTIONS}]).find_contamination(text) is None


def test_question_and_passage_are_compared_separately(build_index):
    index = build_index([{"query": f"Passage: {PASSAGE}\nQuestion: {QUESTION}"}], min_overlap=0.9)
    assert index.find_contamination(QUESTION).detail.endswith("of its question")
    assert index.find_contamination(PASSAGE).detail.endswith("8 of 8 n-grams of another text of the item")
    assert index.find_contamination(f"{PASSAGE[:90]} {QUESTION[:60]}") is None


ITEM_FORMS = {
    "field": ("{question}", lambda question: {"question": question}),
    "label": ("{question}", lambda question: {"query": f"Passage: {PASSAGE}\nQuestion: {question}\nAnswer:"}),
    "options": ("{question}", lambda question: {"query": f"{question}? A. yellow B. red C. blue"}),
    "numbers": ("{question}", lambda question: {"query": f"Question: {question}\n1) yellow 2) red"}),
    "messages": (
        "{question}",
        lambda question: {
            "messages": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
        },
    ),
    "sharegpt": (
        "{question}",
        lambda question: {
            "conversations": [{"from": "system", "value": SYSTEM_PROMPT}, {"from": "human", "value": question}]
        },
    ),
    "input": (f"{INSTRUCTION}\n\n{{question}}", lambda question: {"instruction": INSTRUCTION, "input": question}),
}


@settings(max_examples=100)
@given(
    form=st.sampled_from(sorted(ITEM_FORMS)),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=12),
    limits=st.fixed_dictionaries(
        {
            "shortest_question": st.integers(2, 12),
            "shortest": st.integers(4, 9),
            "ignore_common": st.integers(0, 2),
            "min_overlap": st.sampled_from((0.0, 0.5, 1.0)),
        }
    ),
)
def test_reported_number_is_the_number_of_questions_that_pass(tmp_path_factory, form, lengths, limits):
    template, make_item = ITEM_FORMS[form]
    questions = [" ".join(make_unique_text(length).split()[:length]) for length in lengths]
    items = [{**make_item(question), "choices": [make_unique_text(50 + i)]} for i, question in enumerate(questions)]
    path = tmp_path_factory.mktemp("sets") / "bench.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    config = DataCurationConfig(decontamination={"sets": [str(path)], **limits})
    index = EvaluationIndex.build(list_evaluation_sets([str(path)], path.parent), config, SilentReporter())
    rejections = [index.find_contamination(template.format(question=question)) for question in questions]
    # A question that three items share is ignored; as the item's text of a field beside an instruction, it is found.
    passed = sum(one is None or one.detail.endswith("another text of the item") for one in rejections)
    assert index.sets["bench.jsonl"]["unsearchable"] == passed


def test_items_that_cannot_be_found_are_reported_if_worker_processes_prepare_the_rows(
    write_rows, make_distinct_row, tmp_path, monkeypatch
):
    def prepare_in_this_process(chunks, folder, workers):
        return (chunk_worker.prepare_chunk(number, records, "sft", config, None, folder) for number, records in chunks)

    monkeypatch.setattr(prepared_chunks, "MIN_PARALLEL_BYTES", 0)
    monkeypatch.setattr(prepared_chunks, "_prepare_in_processes", prepare_in_this_process)
    sources = list_sources([str(write_rows(map(make_distinct_row, range(3))))], tmp_path)
    sets = list_sources([str(write_rows([{"question": "Why?"}], "exam.jsonl"))], tmp_path)
    config, reporter = DataCurationConfig(workers=2), RecordingReporter()
    with preview_curation(sources, config, seed=1, reporter=reporter, benchmarks=sets) as result:
        assert result.prepared.evaluation_sets == {"exam.jsonl": {"items": 1, "unsearchable": 1, "unreadable": 0}}
    assert reporter.texts[0].startswith("evaluation set exam.jsonl: the question of 1 of 1 item cannot be searched for")


def test_item_with_personal_data_is_found_before_redaction(build_index, tmp_path):
    question = "Why did ada@example.com write?"
    record = Record("raw.jsonl", 1, {"prompt": question, "response": "She had a question about her order."})
    index = build_index([{"question": question}])
    chunk_worker.prepare_chunk(1, [record], "sft", DataCurationConfig(), index, tmp_path)
    table = ipc.open_file(chunk_worker.get_rows_path(tmp_path, 1)).read_all()
    assert table["reason"].to_pylist() == [CONTAMINATED.name]


def test_rejection_names_the_first_item_with_the_largest_overlap(build_index):
    index = build_index([{"q": " ".join(QUESTION.split()[:14])}, {"q": QUESTION}, {"q": QUESTION + " really"}])
    assert "bench.jsonl:2: " in index.find_contamination(QUESTION).detail


def test_numbers_and_single_letters_alone_are_not_contamination(build_index):
    counting = " ".join(map(str, range(40)))
    index = build_index([{"prompt": f"{QUESTION} {counting} a b c d e f g h i j k l m n o"}])
    assert index.find_contamination(f"Count! {counting}") is None
    assert index.find_contamination("a b c d e f g h i j k l m n o") is None
    assert index.find_contamination(QUESTION) is not None


def test_min_overlap_requires_a_share_of_the_item(build_index):
    half = " ".join(normalize_words(QUESTION).split()[:16])
    assert build_index([{"q": QUESTION}], min_overlap=0.3).find_contamination(half) is not None
    assert build_index([{"q": QUESTION}], min_overlap=0.5).find_contamination(half) is None


def test_common_phrasing_of_a_set_can_be_ignored(build_index):
    preamble = "The following are multiple choice questions with answers about everything that is known of this"
    items = [{"q": f"{preamble} {make_unique_text(i)}"} for i in range(5)]
    assert build_index(items).find_contamination(f"{preamble} and more") is not None
    index = build_index(items, ignore_common=4)
    assert index.find_contamination(f"{preamble} and more") is None
    assert "bench.jsonl:4: " in index.find_contamination(make_unique_text(3)).detail


def test_items_of_only_common_phrasing_count_as_unsearchable(build_index):
    index = build_index([{"q": QUESTION}] * 3, ignore_common=2)
    assert index.sets["bench.jsonl"] == {"items": 3, "unsearchable": 3, "unreadable": 0}
    assert index.find_contamination(QUESTION) is None


def test_evaluation_sets_are_read_from_jsonl_csv_and_gzip(write_rows, tmp_path):
    (tmp_path / "a.csv").write_text(f'question,answer\n"{QUESTION}",72\n')
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(json.dumps({"question": OTHER}) + "\n")
    config = DataCurationConfig(decontamination={"sets": ["*.csv", "b.jsonl.gz"]})
    index = EvaluationIndex.build(list_evaluation_sets(config.decontamination.sets, tmp_path), config, SilentReporter())
    assert [find_contaminating_set(index.find_contamination(text)) for text in (QUESTION, OTHER)] == [
        "a.csv",
        "b.jsonl.gz",
    ]


def test_pickled_index_gives_equal_results(build_index):
    index = build_index(
        [{"q": make_unique_text(i)} for i in range(20)]
        + [{"q": QUESTION}, {"q": "what are the best ways to deal with stress"}]
    )
    unpickled = pickle.loads(pickle.dumps(index))
    for text in (
        QUESTION,
        make_unique_text(4),
        "what are the best ways to deal with stress",
        "nothing of that kind at all",
    ):
        assert unpickled.find_contamination(text) == index.find_contamination(text)


def test_unreadable_records_of_a_set_are_reported(tmp_path):
    (tmp_path / "bench.jsonl").write_text(json.dumps({"q": QUESTION}) + '\n{"broken\n')
    config, reporter = DataCurationConfig(decontamination={"sets": ["bench.jsonl"]}), RecordingReporter()
    index = EvaluationIndex.build(list_evaluation_sets(config.decontamination.sets, tmp_path), config, reporter)
    assert index.sets["bench.jsonl"]["unreadable"] == 1
    assert reporter.texts[0].startswith(
        "evaluation set bench.jsonl: 1 record is unreadable: bench.jsonl:2: invalid JSON"
    )


def test_error_of_an_unreadable_set_contains_no_personal_data(tmp_path):
    (tmp_path / "bench.csv").write_text("ada@example.com,ada@example.com\nq,a\n")
    config = DataCurationConfig(decontamination={"sets": ["bench.csv"]})
    with pytest.raises(InputError, match="the header contains the column '<EMAIL>' more than once"):
        EvaluationIndex.build(list_evaluation_sets(config.decontamination.sets, tmp_path), config, RecordingReporter())


def test_set_without_text_is_refused_with_a_hint(write_rows, tmp_path):
    write_rows([{"gold": 1}], "bench.jsonl")
    config = DataCurationConfig(decontamination={"sets": ["bench.jsonl"]})
    with pytest.raises(InputError) as error:
        EvaluationIndex.build(list_evaluation_sets(config.decontamination.sets, tmp_path), config, SilentReporter())
    assert error.value.message == "the evaluation set bench.jsonl contains no item with text"
    assert (
        error.value.hint
        == "Set data_curation.decontamination.sets to files with one item per record (JSONL, JSON, CSV, Parquet)."
    )


def test_missing_set_is_refused_with_its_config_key(tmp_path):
    with pytest.raises(ConfigurationError) as error:
        list_evaluation_sets(["gone.jsonl"], tmp_path)
    assert error.value.message == "data_curation.decontamination.sets: 'gone.jsonl' does not exist"
    assert "Check the spelling" in error.value.hint


def test_empty_index_finds_no_contamination(tmp_path):
    assert EvaluationIndex.build([], DataCurationConfig(), SilentReporter()).find_contamination(QUESTION) is None


def has_shared_ngram(items, text, n, shortest):
    """Return whether a text shares an n-gram with an item or contains a short item, by direct comparison."""
    words = normalize_words(text).split(" ")
    for item in items:
        item_words = normalize_words(item).split(" ")
        length = min(len(item_words), n)
        if len(item_words) < shortest:
            continue
        grams = {tuple(item_words[i : i + length]) for i in range(len(item_words) - length + 1)}
        if any(tuple(words[i : i + length]) in grams for i in range(len(words) - length + 1)):
            return True
    return False


@settings(max_examples=60)
@given(seed=st.integers(0, 10**9), n=st.integers(5, 9), shortest=st.integers(4, 5))
def test_index_agrees_with_a_brute_force_comparison(tmp_path_factory, seed, n, shortest):
    rng = random.Random(seed)
    make_text = lambda max_words: " ".join(rng.choices(("red", "blue", "green"), k=rng.randint(1, max_words)))  # noqa: E731
    items, texts = [make_text(14) for _ in range(3)], [make_text(60) for _ in range(10)]
    path = tmp_path_factory.mktemp("sets") / "bench.jsonl"
    path.write_text("".join(json.dumps({"q": item}) + "\n" for item in items))
    config = DataCurationConfig(decontamination={"sets": [str(path)], "ngram": n, "shortest": shortest})
    index = EvaluationIndex.build(list_evaluation_sets([str(path)], path.parent), config, SilentReporter())
    assert [index.find_contamination(text) is not None for text in texts] == [
        has_shared_ngram(items, text, n, shortest) for text in texts
    ]


def test_contamination_is_found_at_every_position_of_a_row(build_index):
    index = build_index([{"q": make_unique_text(i)} for i in range(8)])
    filler = [f"filler{i}" for i in range(30)]
    for position, item in itertools.product(range(len(filler)), range(8)):
        text = " ".join([*filler[:position], *make_unique_text(item).split()[4:17], *filler[position:]])
        assert f"bench.jsonl:{item + 1}: 1 of 8 n-grams of its question" in index.find_contamination(text).detail
