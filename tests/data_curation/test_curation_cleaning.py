import pytest
from pydantic import ValidationError

from components.common.errors import InputError
from components.data_curation import cleaning, duplicates, splits
from components.data_curation.config import DataCurationConfig, Fractions
from components.data_curation.formats import rows_of
from components.data_curation.readers import Record
from components.data_curation.rows import give_ids


def rows(*records):
    return [row for record in records for row in rows_of(Record("f", 1, record))]


def ask(question, answer, **more):
    return {"prompt": question, "completion": answer, **more}


@pytest.mark.parametrize(
    ("raw", "normal"),
    [
        ("a\r\nb\rc", "a\nb\nc"),
        ("cafe\u0301", "café"),
        ("code:  \n    indented\t\n", "code:\n    indented"),
        ("a\n\n\n\n\n\nb", "a\n\n\nb"),
        ("    first line keeps its indentation", "    first line keeps its indentation"),
        ("nul\x00 and mark\ufeff", "nul and mark"),
        (" \n\t\n", ""),
    ],
)
def test_text_is_normalised_and_indentation_kept(raw, normal):
    assert cleaning.normalise(raw) == normal
    assert cleaning.normalise(normal) == normal


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (ask(" ", "An answer."), "empty_prompt"),
        (ask("A question?", "\n"), "empty_answer"),
        ({"messages": [{"role": "user", "content": "Hello?"}]}, "empty_answer"),
        (ask("Hm", "A good answer."), "short_prompt"),
        (ask("A question?", "No"), "short_answer"),
        (ask("A question?", "long " * 50), "long_row"),
        ({"text": " "}, "empty_text"),
        ({"text": "tiny"}, "short_text"),
        ({"prompt": "A question?", "chosen": "The same.", "rejected": "The same."}, "no_preference"),
        (ask("A question?", "A good answer."), None),
    ],
)
def test_the_filters_give_their_reasons(record, reason):
    (row,) = rows(record)
    cleaning.clean(row)
    found = cleaning.drop(row, DataCurationConfig(min_prompt_characters=3, min_answer_characters=5, max_row_characters=200))
    assert (found.reason if found else None) == reason


def test_ids_are_the_sources_own_or_the_contents_and_never_twice_the_same():
    made = rows(ask("q", "a"), ask("q", "a"), ask("q", "b"), ask("q", "c", id="mine"), ask("q", "d", id="mine"), ask("q", "e", id="mine-2"))
    give_ids(made)
    ids = [row.id for row in made]
    assert ids[1] == f"{ids[0]}-2"
    assert ids[3:5] == ["mine", "mine-2"]
    assert len(set(ids)) == len(ids)


def test_rows_go_to_splits_by_content_and_seed_not_by_order():
    made = rows(*(ask(f"question {i}", f"answer {i}") for i in range(300)))
    together = list(range(300))
    there = dict(zip([r.digest() for r in made], splits.assign(made, together, Fractions(), 1), strict=True))
    back = dict(zip([r.digest() for r in made[::-1]], splits.assign(made[::-1], together, Fractions(), 1), strict=True))
    assert there == back
    assert set(there.values()) == set(splits.SPLITS)
    assert splits.assign(made, together, Fractions(), 2) != list(there.values())


def test_more_rows_move_no_row():
    made = rows(*(ask(f"question {i}", f"answer {i}") for i in range(400)))
    few = splits.assign(made[:200], list(range(200)), Fractions(), 1)
    assert splits.assign(made, list(range(400)), Fractions(), 1)[:200] == few


def test_a_cluster_lies_in_one_split():
    made = rows(*(ask(f"question {i}", f"answer {i}") for i in range(300)))
    places = splits.assign(made, [i // 3 for i in range(300)], Fractions(train=0.5, validation=0.2, test=0.3), 1)
    assert all(len(set(places[i : i + 3])) == 1 for i in range(0, 300, 3))


def test_an_empty_test_split_says_how_many_rows_are_needed():
    with pytest.raises(InputError, match="too few rows for the split: 12 rows in 9 groups") as error:
        splits.check_filled({"train": 12, "validation": 0, "test": 0}, 9, Fractions())
    assert "about 90 different rows" in error.value.hint


def test_fractions_must_add_up():
    with pytest.raises(ValidationError, match=r"add up to 1\.1"):
        Fractions(train=0.9, validation=0.1, test=0.1)


def test_the_words_of_scripts_without_spaces_are_their_characters():
    assert duplicates.words("Hello, World_2! 東京です") == "hello world_2 東 京 で す"
    assert duplicates.words("?? !!") == "?? !!"


def test_a_repeat_of_a_dropped_row_is_dropped_for_the_row_that_stays():
    made = rows(*(ask(f"question {i}", f"answer {i}") for i in range(4)))
    give_ids(made)
    found = duplicates.Likeness([0, 1, 1, 3], [0, 1, 1, 1], {}, {1: [(0, 0.8)]})
    gone = duplicates.drops(made, found)
    assert {place: why.reason for place, why in gone.items()} == {1: "near_duplicate", 2: "exact_duplicate", 3: "near_duplicate"}
    assert all(made[0].id in why.detail for why in gone.values())


def test_a_row_is_kept_when_only_a_dropped_row_is_like_it():
    made = rows(*(ask(f"question {i}", f"answer {i}") for i in range(3)))
    found = duplicates.Likeness([0, 1, 2], [0, 1, 2], {}, {1: [(0, 0.7)], 2: [(1, 0.7)]})
    assert set(duplicates.drops(made, found)) == {1}
    assert len(set(duplicates.clusters(made, found))) == 1


def test_equal_answers_and_equal_prompts_of_pairs_join_rows():
    sft = rows(*(ask(f"question {i}", "answer") for i in range(3)))
    assert duplicates.clusters(sft, duplicates.Likeness([0, 1, 2], [0, 1, 2], {0: 0, 2: 0})) == [0, 1, 0]
    pairs = rows(*({"prompt": p, "chosen": f"c {i}", "rejected": f"r {i}"} for i, p in enumerate("xyx")))
    assert duplicates.clusters(pairs, duplicates.Likeness([0, 1, 2], [0, 1, 2], {})) == [0, 1, 0]
