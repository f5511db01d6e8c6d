import gzip
import itertools
import json
import pickle
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.common.errors import ConfigurationError, InputError
from components.common.progress import Silent
from components.data_curation.config import DataCurationConfig
from components.data_curation.contamination import REASON, Index, list_sets, set_of
from components.data_curation.drops import Drop
from components.data_curation.duplicates import words

QUESTION = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many in all?"
OTHER = "A robe takes two bolts of blue fibre and half that much white fibre. How many bolts in total does it take, asked the tailor?"


class Notes(Silent):
    """Keeps what is said."""

    def __init__(self):
        self.said = []

    def note(self, text):
        self.said.append(text)


def told(number):
    """A text of twenty words that no other number gives."""
    return " ".join(f"term{number}of{i}" for i in range(20))


@pytest.fixture
def index(write, tmp_path):
    """An index over records, in one file."""

    def build(records, name="bench.jsonl", reporter=None, **knobs):
        config = DataCurationConfig(decontamination={"sets": [str(write(records, name))], **knobs})
        return Index.of(list_sets(config.decontamination.sets, tmp_path), config, reporter or Silent())

    return build


@pytest.mark.parametrize(
    "hidden",
    [
        QUESTION,
        QUESTION.upper(),
        QUESTION.replace(",", " —").replace(" ", "\n"),
        f"Please solve this. {QUESTION} Thank you very much, it is for my daughter.",
        "Then " + " ".join(QUESTION.split()[3:16]),  # thirteen words of it
    ],
)
def test_a_row_that_holds_text_of_an_item_goes_and_names_it(index, hidden):
    found = index([{"question": told(1)}, {"question": QUESTION, "answer": "72"}]).drop(f"User said:\n{hidden}\nIt is 72.")
    assert found is not None
    assert found.reason == REASON
    assert "words with bench.jsonl:2: " in found.detail
    assert set_of(found) == "bench.jsonl"


def test_the_detail_counts_words_and_n_grams(index):
    found = index([{"question": QUESTION}]).drop("We ask: " + " ".join(QUESTION.split()[:15]) + " and nothing more")
    total = len(words(QUESTION).split()) - 12
    assert found == Drop(REASON, f"shares 15 words with bench.jsonl:1: 3 of its {total} n-grams")


def test_twelve_words_of_a_long_item_are_no_hit(index):
    assert index([{"question": QUESTION}]).drop("So " + " ".join(QUESTION.split()[:12]) + " or so") is None


@pytest.mark.parametrize(
    "record", [{"turns": [told(1), QUESTION]}, {"choices": [{"text": QUESTION}]}, {"query": told(2), "gold": QUESTION}]
)
def test_every_text_of_an_item_counts_wherever_it_lies(index, record):
    assert index([record]).drop(QUESTION) is not None


def test_n_grams_do_not_cross_the_fields_of_an_item(index):
    first, second = QUESTION.split()[:9], OTHER.split()[:9]
    built = index([{"question": " ".join(first), "answer": " ".join(second)}], shortest=10)
    assert (built.items, built.too_short) == (1, 1)
    assert built.drop(" ".join(first + second)) is None


def test_a_short_item_is_found_as_a_whole_only(index):
    built = index([{"question": "How can I improve my time management skills?"}])
    assert built.drop("So: how can I improve my time management skills? Plan.").detail == (
        "shares 8 words with bench.jsonl:1: a whole text of it"
    )
    assert built.drop("How can I improve my time management at work?") is None


def test_a_short_question_with_a_long_answer_is_found(index):
    built = index([{"question": "What is fifteen more than a quarter of 48?", "answer": told(7)}])
    assert built.drop("Tell me: what is fifteen more than a quarter of 48?") is not None


def test_items_with_too_few_words_are_counted_and_said(index):
    notes = Notes()
    built = index([{"question": "Who are you?"}, {"question": QUESTION}], reporter=notes)
    assert (built.items, built.too_short) == (2, 1)
    assert built.sets == {"bench.jsonl": {"items": 2, "too_short": 1, "unreadable": 0}}
    assert notes.said == ["1 of 2 evaluation items are too short, or too common, to be looked for"]
    assert built.drop("Who are you?") is None


def test_the_item_that_shares_most_is_named_and_of_equals_the_first(index):
    built = index([{"q": " ".join(QUESTION.split()[:14])}, {"q": QUESTION}, {"q": QUESTION + " really"}])
    assert "bench.jsonl:2: " in built.drop(QUESTION).detail


def test_numbers_and_single_letters_alone_are_no_hit(index):
    counting = " ".join(map(str, range(40)))
    built = index([{"prompt": f"{QUESTION} {counting} a b c d e f g h i j k l m n o"}])
    assert built.drop(f"Count! {counting}") is None
    assert built.drop("a b c d e f g h i j k l m n o") is None
    assert built.drop(QUESTION) is not None


def test_a_share_of_the_item_can_be_asked_for(index):
    half = " ".join(words(QUESTION).split()[:16])
    assert index([{"q": QUESTION}], min_overlap=0.3).drop(half) is not None
    assert index([{"q": QUESTION}], min_overlap=0.5).drop(half) is None


def test_the_sets_own_phrasing_can_be_ignored(index):
    lead = "The following are multiple choice questions with answers about everything that is known of this"
    items = [{"q": f"{lead} {told(i)}"} for i in range(5)]
    assert index(items).drop(f"{lead} and more") is not None
    built = index(items, ignore_common=4)
    assert built.drop(f"{lead} and more") is None
    assert "bench.jsonl:4: " in built.drop(told(3)).detail


def test_items_of_common_phrasing_alone_count_as_not_looked_for(index):
    built = index([{"q": QUESTION}] * 3, ignore_common=2)
    assert (built.items, built.too_short) == (3, 3)
    assert built.drop(QUESTION) is None


def test_sets_are_read_from_jsonl_csv_and_gz(write, tmp_path):
    (tmp_path / "a.csv").write_text(f'question,answer\n"{QUESTION}",72\n')
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(json.dumps({"question": OTHER}) + "\n")
    config = DataCurationConfig(decontamination={"sets": ["*.csv", "b.jsonl.gz"]})
    built = Index.of(list_sets(config.decontamination.sets, tmp_path), config, Silent())
    assert [set_of(built.drop(text)) for text in (QUESTION, OTHER)] == ["a.csv", "b.jsonl.gz"]


def test_an_index_works_the_same_in_another_process(index):
    built = index([{"q": told(i)} for i in range(20)] + [{"q": QUESTION}, {"q": "what are the best ways to deal with stress"}])
    again = pickle.loads(pickle.dumps(built))
    for text in (QUESTION, told(4), "what are the best ways to deal with stress", "nothing of that kind at all"):
        assert again.drop(text) == built.drop(text)


def test_unreadable_places_of_a_set_are_said(tmp_path):
    (tmp_path / "bench.jsonl").write_text(json.dumps({"q": QUESTION}) + '\n{"broken\n')
    config, notes = DataCurationConfig(decontamination={"sets": ["bench.jsonl"]}), Notes()
    built = Index.of(list_sets(config.decontamination.sets, tmp_path), config, notes)
    assert built.sets["bench.jsonl"]["unreadable"] == 1
    assert notes.said[0].startswith("evaluation set bench.jsonl: a place is unreadable: bench.jsonl:2: invalid JSON")


def test_what_is_said_of_a_set_that_cannot_be_read_quotes_no_personal_data(tmp_path):
    (tmp_path / "bench.csv").write_text("ada@example.com,ada@example.com\nq,a\n")
    config = DataCurationConfig(decontamination={"sets": ["bench.csv"]})
    with pytest.raises(InputError, match="the header names the column '<EMAIL>' twice"):
        Index.of(list_sets(config.decontamination.sets, tmp_path), config, Notes())


def test_a_set_without_any_text_is_an_error_that_says_what_to_name(write, tmp_path):
    write([{"gold": 1}], "bench.jsonl")
    config = DataCurationConfig(decontamination={"sets": ["bench.jsonl"]})
    with pytest.raises(InputError) as caught:
        Index.of(list_sets(config.decontamination.sets, tmp_path), config, Silent())
    assert caught.value.message == "the evaluation set bench.jsonl holds no item with text"
    assert caught.value.hint == "Name files with one item a record (JSONL, JSON, CSV, Parquet) in data_curation.decontamination.sets."


def test_a_set_that_is_not_there_names_the_key_it_was_asked_for_by(tmp_path):
    with pytest.raises(ConfigurationError) as caught:
        list_sets(["gone.jsonl"], tmp_path)
    assert caught.value.message == "data_curation.decontamination.sets: 'gone.jsonl' does not exist"
    assert "check the spelling" in caught.value.hint


def test_without_sets_nothing_is_found(tmp_path):
    assert Index.of([], DataCurationConfig(), Silent()).drop(QUESTION) is None


def by_hand(items, text, n, shortest):
    """Whether a text shares an n-gram with an item, or holds a short one whole: without hashes or shortcuts."""
    spoken = words(text).split(" ")
    for item in items:
        asked = words(item).split(" ")
        length = min(len(asked), n)
        if len(asked) < shortest:
            continue
        grams = {tuple(asked[i : i + length]) for i in range(len(asked) - length + 1)}
        if any(tuple(spoken[i : i + length]) in grams for i in range(len(spoken) - length + 1)):
            return True
    return False


@settings(max_examples=60)
@given(seed=st.integers(0, 10**9), n=st.integers(5, 9), short=st.integers(4, 5))
def test_what_is_found_is_what_comparing_every_n_gram_finds(tmp_path_factory, seed, n, short):
    chance = random.Random(seed)
    said = lambda most: " ".join(chance.choices(("red", "blue", "green"), k=chance.randint(1, most)))  # noqa: E731
    items, texts = [said(14) for _ in range(3)], [said(60) for _ in range(10)]
    path = tmp_path_factory.mktemp("sets") / "bench.jsonl"
    path.write_text("".join(json.dumps({"q": item}) + "\n" for item in items))
    config = DataCurationConfig(decontamination={"sets": [str(path)], "ngram": n, "shortest": short})
    built = Index.of(list_sets([str(path)], path.parent), config, Silent())
    assert [built.drop(text) is not None for text in texts] == [by_hand(items, text, n, short) for text in texts]


def test_leaks_at_every_place_of_a_row_are_found(index):
    built = index([{"q": told(i)} for i in range(8)])
    filler = [f"filler{i}" for i in range(30)]
    for place, item in itertools.product(range(len(filler)), range(8)):
        text = " ".join([*filler[:place], *told(item).split()[4:17], *filler[place:]])
        assert f"bench.jsonl:{item + 1}: 1 of its 8 n-grams" in built.drop(text).detail
