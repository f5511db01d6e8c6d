"""Exported GGUF files in llama.cpp, if its Python binding is installed: tokens, logits and answers.

CI does not install llama-cpp-python, which is compiled during the installation: `pip install llama-cpp-python`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from components.common.models import model_loading
from components.triton_packaging import quantization
from components.triton_packaging.gguf_export import gguf_file, vocabulary
from components.triton_packaging.gguf_export.vocabulary import PreTokenizer
from tests.tiny import tiny_tokenizer
from tests.triton_packaging.gguf_texts import TEXTS
from tests.triton_packaging.test_gguf_export import CASES, build_case

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")


def open_gguf(path: Path, **options: Any) -> Any:
    return llama_cpp.Llama(str(path), n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False, **options)


def tokenize(model: Any, text: str) -> list[int]:
    tokens: list[int] = model.tokenize(text.encode(), add_bos=True, special=True)
    return tokens


def compute_logits(model: Any, ids: list[int]) -> torch.Tensor:
    model.reset()
    model.eval(ids)
    return torch.tensor(model.scores[: len(ids)])


@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_computes_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    config, tokenizer = build_case(case), tiny_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    gguf_file.write_gguf(tmp_path / "model.gguf", model, tokenizer, "f32", {})
    ids = [number % 400 for number in range(3, 300, 3)]
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    logits = compute_logits(open_gguf(tmp_path / "model.gguf", logits_all=True), ids)
    assert (logits - expected).abs().max() < 0.01 * expected.abs().max()


def build_tokenizer(known: PreTokenizer) -> PreTrainedTokenizerFast:
    """Train a tokenizer with a pre-tokenizer that llama.cpp knows."""
    steps = []
    for step in known.steps:
        if step["type"] == "ByteLevel":
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=step["use_regex"]))
        elif step["type"] == "Digits":
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        else:
            steps.append(pre_tokenizers.Split(Regex(step["pattern"]["Regex"]), "isolated"))
    tokenizer = Tokenizer(models.BPE(ignore_merges=known.ignores_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text for text in TEXTS if "<|" not in text], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>",
        chat_template="{{ messages }}",
    )  # fmt: skip


@pytest.mark.parametrize("known", vocabulary.PRE_TOKENIZERS, ids=lambda known: known.key)
def test_llama_cpp_tokenizes_like_each_supported_tokenizer(known: PreTokenizer, tmp_path: Path) -> None:
    tokenizer = build_tokenizer(known)
    config = build_case("llama")
    config.vocab_size = 1000  # more rows than tokens
    model = AutoModelForCausalLM.from_config(config)
    gguf_file.write_gguf(tmp_path / "model.gguf", model, tokenizer, "f16", {})
    loaded = open_gguf(tmp_path / "model.gguf", vocab_only=True)
    different = [text for text in TEXTS if tokenize(loaded, text) != tokenizer.encode(text)]
    assert not different


@pytest.mark.long  # loads a model of 135 million parameters four times
@pytest.mark.parametrize("type_", ["f16", "q8_0"])
def test_llama_cpp_answers_like_the_embedded_model(type_: gguf_file.GgufType, tmp_path: Path) -> None:
    model = model_loading.open_model(model_loading.EMBEDDED_SOURCE)
    tokenizer, original = model_loading.load_tokenizer(model.tokenizer), quantization.load_merged_model(model)
    gguf_file.write_gguf(tmp_path / "model.gguf", original, tokenizer, type_, {"general.name": "embedded"})
    loaded = open_gguf(tmp_path / "model.gguf", logits_all=True)
    assert [text for text in TEXTS if tokenize(loaded, text) != tokenizer.encode(text)] == []
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    with torch.inference_mode():
        expected = original(torch.tensor([ids])).logits[0]
        answer = original.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :]
    assert (compute_logits(loaded, ids) - expected).abs().max() < 0.08 * expected.abs().max()
    loaded.reset()
    result = loaded.create_chat_completion(messages, max_tokens=24, temperature=0.0)["choices"][0]
    assert result["message"]["content"] == tokenizer.decode(answer, skip_special_tokens=True)
    assert result["finish_reason"] == "stop"
