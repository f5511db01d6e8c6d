"""Semantic duplicates. Fast tier: the model is a table of random word vectors; the encoder test is long, it imports torch."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from components.common.models import text_embeddings
from components.common.runtime.errors import ConfigurationError
from components.common.runtime.reporters import SilentReporter
from components.data_curation import semantic_duplicates
from components.data_curation.config import DataCurationConfig

SENTENCE = "how do i reset the lost password please then open a page on what is of close account click"
FILLERS = [f"filler{i}" for i in range(600)]
HIDDEN_SIZE = 64


def write_model(folder: Path, dtype: str = "F32") -> Path:
    """Write a tokenizer of whole words and their random vectors as safetensors."""
    folder.mkdir(parents=True)
    vocabulary = {
        word: number for number, word in enumerate(["[unk]", *SENTENCE.split(), *FILLERS, *map(str, range(100))])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[unk]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    vectors = np.random.default_rng(1).normal(size=(len(vocabulary), HIDDEN_SIZE)).astype(np.float32)
    data = vectors.astype(np.float16).tobytes() if dtype == "F16" else vectors.tobytes()
    if dtype == "BF16":
        data = (vectors.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    entry = {"dtype": dtype, "shape": list(vectors.shape), "data_offsets": [0, len(data)]}
    header = json.dumps({"model.embed_tokens.weight": entry}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


@pytest.fixture
def model(tmp_path, monkeypatch):
    """Write a model folder, and accept it without the checks of a whole model."""
    folder = write_model(tmp_path / "model")
    found = semantic_duplicates.model_loading.LocalBaseModel(folder, "d" * 64, str(folder))
    monkeypatch.setattr(semantic_duplicates.model_loading, "find_local_base_model", lambda source: found)
    return folder


@pytest.fixture
def rows(make_conversation):
    """Return 40 rows without common words, and reworded copies of the first rows."""
    distinct = [
        make_conversation(" ".join(FILLERS[i * 15 : i * 15 + 7]), " ".join(FILLERS[i * 15 + 7 : i * 15 + 15]))
        for i in range(40)
    ]
    reworded = [
        make_conversation(
            " ".join(["please", *FILLERS[i * 15 + 6 : i * 15 - 1 if i else None : -1]]),
            " ".join(["then", *FILLERS[i * 15 + 14 : i * 15 + 6 : -1]]),
        )
        for i in range(3)
    ]
    same_prompt = make_conversation(distinct[5]["messages"][0]["content"], "open the account page then click on lost")
    return [*distinct, *reworded, same_prompt]


def test_reworded_rows_are_rejected_with_the_kept_row_and_the_similarity(
    model, rows, write_rows, curate_files, read_rows
):
    settings = {"threshold": 0.8, "model": str(model)}
    off = curate_files(write_rows(rows), out="off")
    assert off.manifest.summary["rows"]["kept"] == 44, "word 5-grams do not find reworded rows"
    dataset = curate_files(write_rows(rows), semantic_duplicates=settings)
    counts = dataset.manifest.summary["rows"]
    assert counts == {"in": 44, "kept": 41, "quarantined": 0, "rejected": {"semantic_duplicate": 3}}
    rejected = read_rows(dataset, "rejected")
    kept = {row["id"] for split in ("train", "validation", "test") for row in read_rows(dataset, split)}
    for row in rejected:
        original, similarity = row["detail"].split(", cosine similarity ")
        assert original in kept
        assert 0.8 <= float(similarity) <= 1
    assert "semantic_duplicate" in (dataset.path / "report.html").read_text()
    again = curate_files(write_rows(rows), out="again", semantic_duplicates=settings)
    assert again.sha256 == dataset.sha256 != off.sha256


def test_prompts_with_different_numbers_are_no_duplicates(model, write_rows, curate_files, make_conversation):
    questions = ["what is the account page {}", "the account page {} is what please"]
    answers = ["click on the page then close the account", "close the account then please click on the page"]
    for numbers, kept in (((4, 4), 41), ((4, 5), 42)):
        pair = [make_conversation(q.format(n), a) for q, a, n in zip(questions, answers, numbers, strict=True)]
        fillers = [make_conversation(f"{FILLERS[i]} {FILLERS[i + 300]}", FILLERS[i + 100]) for i in range(40)]
        path = write_rows([*pair, *fillers], f"{kept}.jsonl")
        dataset = curate_files(path, out=str(kept), semantic_duplicates={"threshold": 0.8, "model": str(model)})
        assert dataset.manifest.summary["rows"]["kept"] == kept


def test_questions_under_one_long_context_are_kept(model, write_rows, curate_files, make_conversation):
    context = " ".join(FILLERS[:120])
    rows = [
        make_conversation(
            f"{context}\n\n{FILLERS[150 + i]} {FILLERS[300 + i]}", f"{FILLERS[400 + i]} {FILLERS[200 + i]}"
        )
        for i in range(100)
    ]
    dataset = curate_files(write_rows(rows), semantic_duplicates={"threshold": 0.9, "model": str(model)})
    assert dataset.manifest.summary["rows"]["kept"] >= 95


def test_clusters_find_the_same_duplicates(model, rows, write_rows, curate_files, monkeypatch):
    settings = {"threshold": 0.8, "model": str(model)}
    monkeypatch.setattr(semantic_duplicates, "MAX_COMPARED_ROWS", 40)
    monkeypatch.setattr(semantic_duplicates, "CLUSTER_ROWS", 15)
    dataset = curate_files(write_rows(rows), semantic_duplicates=settings)
    assert dataset.manifest.summary["rows"]["rejected"] == {"semantic_duplicate": 3}


def test_plain_text_and_labelled_rows(model, write_rows, curate_files):
    texts = [{"text": " ".join(FILLERS[i * 9 : i * 9 + 9])} for i in range(40)]
    copy = {"text": " ".join(["the", *FILLERS[8::-1]])}
    dataset = curate_files(write_rows([*texts, copy]), semantic_duplicates={"threshold": 0.8, "model": str(model)})
    assert dataset.manifest.summary["rows"]["rejected"] == {"semantic_duplicate": 1}
    labelled = [
        {
            "prompt": " ".join(FILLERS[i * 9 : i * 9 + 4]),
            "completion": " ".join(FILLERS[i * 9 + 4 : i * 9 + 9]),
            "label": True,
        }
        for i in range(40)
    ]
    opposite = {"prompt": " ".join(FILLERS[3::-1]), "completion": " ".join(FILLERS[8:3:-1]), "label": False}
    path = write_rows([*labelled, opposite], "labelled.jsonl")
    dataset = curate_files(path, out="labelled", semantic_duplicates={"threshold": 0.95, "model": str(model)})
    assert dataset.manifest.summary["rows"]["kept"] == 41


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_precision_embeddings_equal_those_of_float32(tmp_path, dtype):
    texts = ["how do i reset the password", "open the account page", "", *FILLERS[:20]]
    exact, half = (
        text_embeddings.build_input_embedder(write_model(tmp_path / name, name), [texts])(texts)
        for name in ("F32", dtype)
    )
    assert exact.shape == (23, HIDDEN_SIZE)
    np.testing.assert_allclose(np.linalg.norm(exact, axis=1), [1, 1, 0, *[1] * 20], atol=1e-5)
    assert (np.sum(exact * half, axis=1)[[0, 1, *range(3, 23)]] > 0.999).all()


def test_model_without_embeddings_is_refused(tmp_path):
    folder = write_model(tmp_path / "model", "I32")
    with pytest.raises(ConfigurationError, match="contain no input embeddings"):
        text_embeddings.build_input_embedder(folder, [])


def test_missing_model_is_refused_before_the_rows_are_read(tmp_path):
    config = DataCurationConfig(semantic_duplicates={"threshold": 0.9})
    with pytest.raises(ConfigurationError, match=r"semantic_duplicates\.model is not set"):
        semantic_duplicates.compute_model_digest(config)
    config = DataCurationConfig(semantic_duplicates={"threshold": 0.9, "model": str(tmp_path / "none")})
    with pytest.raises(ConfigurationError):
        semantic_duplicates.fetch_model(config, SilentReporter())
    assert semantic_duplicates.compute_model_digest(DataCurationConfig()) == ""


@pytest.mark.long
def test_encoder_averages_its_last_hidden_states(tmp_path):
    import torch
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder = write_model(tmp_path / "model")
    size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    config = BertConfig(
        vocab_size=size, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    encoder = BertModel(config, add_pooling_layer=False).eval()
    encoder.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), unk_token="[unk]", pad_token="[unk]"
    )
    tokenizer.save_pretrained(folder)
    texts = ["how do i reset the password", "open the account page please"]
    with torch.no_grad():
        states = [encoder(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in texts]
    expected = [(state / state.norm()).numpy() for state in states]
    np.testing.assert_allclose(text_embeddings.build_encoder(folder)(texts), expected, atol=1e-5)


def test_words_with_digits_are_found_in_linear_time():
    assert semantic_duplicates.WORD_WITH_DIGIT.findall("From 5 to 7.5 km, v2.0-rc1 (2026-01-31). a5 x") == [
        *("5", "7.5", "v2.0-rc1", "2026-01-31", "a5"),
    ]
    started = time.perf_counter()
    assert semantic_duplicates.WORD_WITH_DIGIT.findall("a" * 200_000) == []
    assert time.perf_counter() - started < 5, "200,000 letters take a few milliseconds"
