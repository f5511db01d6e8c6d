"""Labels: in every supported chat format, packed or not, only the assistant's tokens contribute to the loss and the gradient."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AddedToken, PreTrainedTokenizerFast

from components.common.artifacts.artifact_folder import Artifact
from components.common.models import chat_templates
from components.common.runtime.reporters import SilentReporter
from components.fine_tuning import trainers
from components.fine_tuning.objectives import IGNORED_LABEL
from components.fine_tuning.stage import finetune
from components.fine_tuning.token_cache import TokenizedDataset
from tests.fine_tuning.builders import (
    Row,
    build_conversation,
    build_dataset,
    collate_split,
    flatten,
    load_tiny_model,
    recipe,
    tokenize,
    unpack_column,
)
from tests.tiny import SENTENCES, tiny_model, tiny_tokenizer

CHATML = """
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] + '\n\n' }}
    {%- endif %}
    {{- '# Tools\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' }}{{ tool | tojson }}
    {%- endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message['content'] + '\n</tool_response><|im_end|>\n' }}
    {%- elif message['role'] != 'system' %}
        {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""
LLAMA_3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
    "+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}"
    "{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
PHI_3_MEDIUM = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '<|user|>' + '\n' + message['content'] + '<|end|>' + '\n' + '<|assistant|>' + '\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + '<|end|>' + '\n' }}{% endif %}{% endfor %}"
)
PHI_3_MINI = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
ALPACA = """
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {{- '### Instruction:\n' + message['content'] + '\n\n' }}
    {%- elif message['role'] == 'assistant' %}
        {{- '### Response:\n' + message['content'] + eos_token + '\n\n' }}
    {%- else %}
        {{- message['content'] + '\n\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '### Response:\n' }}
{%- endif %}"""
INDENTED = """    {% for message in messages %}
    {% if message['role'] == 'assistant' %}
A: {{ message['content'] }}{{ eos_token }}
    {% else %}
Q: {{ message['content'] }}
    {% endif %}
    {% endfor %}
    {% if add_generation_prompt %}
{{ 'A:' }}{% endif %}
"""
THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
SPECIAL_TOKENS = [
    "<s>", "</s>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<bos>", "<start_of_turn>",
    "<end_of_turn>", "<|user|>", "<|system|>", "<|assistant|>", "<|end|>", "<think>", "</think>",
]  # fmt: skip


@dataclass(frozen=True)
class ChatFormat:
    """A chat template with its special tokens. `learned` returns the text of an answer as it should be labelled."""

    template: str
    eos: str
    learned: Callable[[str], str]
    bos: str = "<s>"
    system: bool = True
    tools: bool = False

    def tokenizer(self) -> Any:
        tokenizer = tiny_tokenizer()
        tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL_TOKENS})
        tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = self.bos, self.eos, self.eos
        tokenizer.chat_template = self.template
        return tokenizer


FORMATS = {
    "chatml": ChatFormat(CHATML, "<|im_end|>", "{}<|im_end|>".format, "<|im_start|>", tools=True),
    "llama-3": ChatFormat(LLAMA_3, "<|eot_id|>", "{}<|eot_id|>".format, "<|begin_of_text|>"),
    "llama-2": ChatFormat(LLAMA_2, "</s>", " {} </s>".format),
    "mistral": ChatFormat(MISTRAL, "</s>", "{}</s>".format, system=False),
    "gemma": ChatFormat(GEMMA, "<end_of_turn>", "{}<end_of_turn>".format, "<bos>", system=False),
    "phi-3": ChatFormat(PHI_3_MEDIUM, "<|end|>", "{}<|end|>".format, system=False),
    "zephyr": ChatFormat(ZEPHYR, "</s>", "{}</s>".format),
    "alpaca": ChatFormat(ALPACA, "</s>", "{}</s>".format),
    "plain": ChatFormat(chat_templates.DEFAULT_CHAT_TEMPLATE, "</s>", " {}</s>".format),
    "indented": ChatFormat(INDENTED, "</s>", " {}</s>".format),
}
TOOLS = json.dumps(
    [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
)
each_format = pytest.mark.parametrize("name", FORMATS)
packed_or_not = pytest.mark.parametrize("packing", [False, True], ids=["separate", "packed"])


def build_rows(chat_format: ChatFormat) -> list[Row]:
    """Build single-turn and multi-turn conversations, with system messages and tools where the format supports them."""
    system = "Be brief. Sé breve." if chat_format.system else ""
    tool_conversation = build_conversation("tool", "What is 2 + 2?", '{"name": "add"}', system=system, tools=TOOLS)
    tool_conversation["messages"] += [{"role": "tool", "content": "4"}, {"role": "assistant", "content": "It is 4."}]
    return [
        build_conversation(
            "turns",
            "What is 2 + 2?",
            "Four.",
            "And 3 + 3?",
            "Six, naïvely.",
            "And in 漢字?",
            "六 🎉\n  ist   richtig.",
            system=system,
        ),
        build_conversation("one", "Wie heißt die Klasse?", "Sie heißt `Größe`."),
        build_conversation("short", "Open the file.", "It returns None.", system=system),
        *([tool_conversation] if chat_format.tools else []),
    ]


def list_answers(row: Row) -> list[str]:
    return [str(message["content"]) for message in row["messages"] if message["role"] == "assistant"]


def decode_labels(tokenizer: Any, ids: list[int], labels: list[int]) -> list[str]:
    """Decode each consecutive run of labels. Every label equals its token or is ignored."""
    assert all(label in (token, IGNORED_LABEL) for token, label in zip(ids, labels, strict=True))
    return [
        str(tokenizer.decode(list(run)))
        for is_learned, run in groupby(labels, lambda label: label != IGNORED_LABEL)
        if is_learned
    ]


@dataclass(frozen=True)
class Case:
    """A chat format with its tokenized rows and the tiny model."""

    chat_format: ChatFormat
    rows: dict[str, Row]
    tokenizer: Any
    splits: TokenizedDataset
    model: Any
    batch: Any

    def examples(self) -> list[tuple[list[int], list[int]]]:
        """Return tokens and labels of each row in batch order."""
        rows_by_example = [
            zip(unpack_column(example), unpack_column(example, "labels"), strict=True)
            for example in self.splits.train.dataset
        ]
        return [pair for rows in rows_by_example for pair in rows]

    def ids(self) -> list[str]:
        return self.splits.train.row_ids(range(len(self.splits.train.lengths)))


@pytest.fixture(scope="module", autouse=True)
def single_thread() -> Iterator[None]:
    """Use one thread: more threads slow down so small a model, especially on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def model(tiny: Path) -> Any:
    return load_tiny_model(FORMATS["chatml"].tokenizer(), tiny)  # every tokenizer has the special tokens of all formats


@pytest.fixture(scope="module")
def cases(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Case]:
    @cache
    def build_case(name: str, packing: bool) -> Case:
        chat_format, config, folder = FORMATS[name], recipe(packing=packing), tmp_path_factory.mktemp(name)
        tokenizer, rows = chat_format.tokenizer(), build_rows(chat_format)
        splits = tokenize(build_dataset(folder / "dataset", "sft", rows), tokenizer, folder, config)
        return Case(
            chat_format,
            {row["id"]: row for row in rows},
            tokenizer,
            splits,
            model,
            collate_split(splits.train, config, tokenizer),
        )

    return build_case


@pytest.fixture
def case(name: str, packing: bool, cases: Callable[[str, bool], Case]) -> Case:
    return cases(name, packing)


@each_format
@packed_or_not
def test_only_assistant_turns_and_their_end_tokens_have_labels(case: Case, packing: bool) -> None:
    assert len(case.ids()) == len(case.rows)
    assert (len(case.splits.train.lengths) < len(case.rows)) == packing
    for name, (ids, labels) in zip(case.ids(), case.examples(), strict=True):
        expected = [case.chat_format.learned(answer) for answer in list_answers(case.rows[name])]
        assert decode_labels(case.tokenizer, ids, labels) == expected
        row = case.rows[name]
        rendered = chat_templates.render_conversation(
            case.tokenizer, row["messages"], json.loads(row["tools"]) if row["tools"] else None
        )
        assert case.tokenizer.decode(ids) == rendered, "the rest of the conversation stands around it"


def compute_token_losses(model: Any, ids: list[int], labels: list[int]) -> torch.Tensor:
    """Return the negative log-likelihood of each labelled token when the row is computed separately."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0]
    log_probabilities = logits.log_softmax(-1)
    positions = [i for i, label in enumerate(labels) if i > 0 and label != IGNORED_LABEL]
    return -torch.stack([log_probabilities[i - 1, ids[i]] for i in positions])


def compute_mean_loss(model: Any, examples: list[tuple[list[int], list[int]]]) -> float:
    return float(torch.cat([compute_token_losses(model, *example) for example in examples]).mean())


@each_format
@packed_or_not
def test_loss_is_the_mean_over_answer_tokens_of_separate_rows(case: Case) -> None:
    loss = trainers._compute_answer_loss(case.model, case.batch, None)
    assert loss.item() == pytest.approx(compute_mean_loss(case.model, case.examples()), abs=1e-5)


@each_format
@packed_or_not
def test_gradient_reaches_answer_tokens_only(case: Case) -> None:
    has_gradient = find_positions_with_gradient(case.model, case.batch)
    labels = [[IGNORED_LABEL, *labels[1:]] for _, labels in case.examples()]  # a row's first token has no prediction
    next_labels = [*flatten(labels)[1:], IGNORED_LABEL]
    assert has_gradient == [label != IGNORED_LABEL for label in next_labels]


def find_positions_with_gradient(model: Any, batch: Any) -> list[bool]:
    """Return for each position whether the loss has a gradient in the hidden state before the output head."""
    outputs: list[Any] = []
    hook = model.model.norm.register_forward_hook(lambda _, __, output: outputs.append(output))
    loss = trainers._compute_answer_loss(model, batch, None)
    hook.remove()
    (hidden,) = outputs
    hidden.retain_grad()
    loss.backward()
    return [bool(value) for value in hidden.grad[0].abs().sum(-1) > 0]


@packed_or_not
def test_plain_text_loss_covers_all_tokens_but_the_first_of_each_row(packing: bool, model: Any, tmp_path: Path) -> None:
    tokenizer, config = FORMATS["chatml"].tokenizer(), recipe(packing=packing, objective="text")
    texts = [
        {"id": str(i), "text": text} for i, text in enumerate(["Open the file.", "Naïve 漢字 🎉", "It returns None."])
    ]
    splits = tokenize(build_dataset(tmp_path / "dataset", "text", texts), tokenizer, tmp_path, config)
    examples = [(ids, ids) for example in splits.train.dataset for ids in unpack_column(example)]
    batch = collate_split(splits.train, config, tokenizer)
    assert trainers._compute_answer_loss(model, batch, None).item() == pytest.approx(
        compute_mean_loss(model, examples), abs=1e-5
    )
    expected = flatten([[1] * (len(ids) - 1) + [0] for ids, _ in examples])
    assert find_positions_with_gradient(model, batch) == [bool(value) for value in expected]


@packed_or_not
def test_micro_batch_losses_sum_to_the_mean_over_answer_tokens(packing: bool, model: Any, tmp_path: Path) -> None:
    tokenizer, config = FORMATS["chatml"].tokenizer(), recipe(packing=packing, max_length=100)
    splits = tokenize(
        build_dataset(tmp_path / "dataset", "sft", build_rows(FORMATS["chatml"])), tokenizer, tmp_path, config
    )
    collate = trainers.build_collator(config, tokenizer)
    batches = [collate([example]) for example in splits.train.dataset]
    assert len(batches) > 1
    num_items = sum(int((batch["labels"] != IGNORED_LABEL).sum()) for batch in batches)
    examples = [
        pair
        for example in splits.train.dataset
        for pair in zip(unpack_column(example), unpack_column(example, "labels"), strict=True)
    ]
    total = sum(trainers._compute_answer_loss(model, batch, num_items).item() for batch in batches)
    assert total == pytest.approx(compute_mean_loss(model, examples), abs=1e-5)


def test_padding_has_no_labels_even_if_pad_token_is_eos(model: Any, tmp_path: Path) -> None:
    tokenizer, config = FORMATS["chatml"].tokenizer(), recipe(adaptation="prompt_tuning")
    splits = tokenize(
        build_dataset(tmp_path / "dataset", "sft", build_rows(FORMATS["chatml"])), tokenizer, tmp_path, config
    )
    batch = collate_split(splits.train, config, tokenizer)
    assert tokenizer.pad_token == tokenizer.eos_token
    for example, ids, labels in zip(
        splits.train.dataset, batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True
    ):
        assert decode_labels(tokenizer, ids, labels) == decode_labels(
            tokenizer, example["input_ids"], example["labels"]
        )
    examples = [(list(row["input_ids"]), list(row["labels"])) for row in splits.train.dataset]
    with torch.no_grad():
        assert float(model(**batch).loss) == pytest.approx(compute_mean_loss(model, examples), abs=1e-5)


def train_one_step(dataset: Artifact, tiny: Path, folder: Path, **changes: object) -> dict[str, float]:
    """Train one step over four rows and return the first training and validation losses."""
    values = {
        "base_model": str(tiny),
        "max_steps": 1,
        "batch_size": 4,
        "max_length": 120,
        "lora": {"dropout": 0},
        **changes,
    }
    model = finetune(
        dataset, folder / "model", recipe(**values), seed=0, state=folder / "state", reporter=SilentReporter()
    )
    log = [json.loads(line) for line in (model.path / "training.jsonl").read_text().splitlines()]
    names = ("validation_loss", "train_loss")
    return {name: next(line[name] for line in log if name in line) for name in names}


def build_four_rows(folder: Path) -> tuple[Artifact, list[tuple[list[int], list[int]]]]:
    """Build a dataset whose answers differ much in length, used for training and validation, and its tokens and labels."""
    rows = [
        build_conversation(str(i), "What is it?", "It is " + "the list " * i * i, "And?", "None.") for i in range(1, 5)
    ]
    encoded = [chat_templates.encode_conversation(tiny_tokenizer(), row["messages"], max_length=200) for row in rows]
    examples = [
        (
            row.input_ids,
            [
                token if is_answer else IGNORED_LABEL
                for token, is_answer in zip(row.input_ids, row.answer_mask, strict=True)
            ],
        )
        for row in encoded
    ]
    return build_dataset(folder / "dataset", "sft", rows, rows), examples


@packed_or_not
def test_initial_losses_match_the_answer_loss(packing: bool, tiny: Path, tmp_path: Path) -> None:
    dataset, examples = build_four_rows(tmp_path)
    losses = train_one_step(dataset, tiny, tmp_path, packing=packing, micro_batch_size=4)
    expected = compute_mean_loss(load_tiny_model(tiny_tokenizer(), tiny), examples)
    assert losses == {name: pytest.approx(expected, abs=1e-4) for name in losses}


@pytest.fixture(scope="module")
def single_row_losses(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, float], float]:
    """First losses of a training with micro-batches of one row, and the expected mean over all answer tokens."""
    folder = tmp_path_factory.mktemp("one-by-one")
    dataset, examples = build_four_rows(folder)
    return train_one_step(dataset, tiny, folder, micro_batch_size=1), compute_mean_loss(
        load_tiny_model(tiny_tokenizer(), tiny), examples
    )


def test_training_loss_does_not_depend_on_micro_batch_size(
    single_row_losses: tuple[dict[str, float], float],
) -> None:
    losses, expected = single_row_losses
    assert losses["train_loss"] == pytest.approx(expected, abs=1e-4)


def test_validation_loss_does_not_depend_on_micro_batch_size(
    single_row_losses: tuple[dict[str, float], float],
) -> None:
    losses, expected = single_row_losses
    assert losses["validation_loss"] == pytest.approx(expected, abs=1e-4)


def decode_learned(tokenizer: Any, *turns: str) -> list[str]:
    encoded = chat_templates.encode_conversation(
        tokenizer, build_conversation("any", *turns)["messages"], max_length=1000
    )
    labels = [
        token if is_answer else IGNORED_LABEL
        for token, is_answer in zip(encoded.input_ids, encoded.answer_mask, strict=True)
    ]
    return decode_labels(tokenizer, encoded.input_ids, labels)


def test_thinking_answer_is_learned_from_the_end_of_the_prompt() -> None:
    tokenizer = ChatFormat(THINKING, "<|im_end|>", str).tokenizer()
    thought = "<think>\nTwo and two.\n</think>\n\nFour."
    assert (
        decode_learned(tokenizer, "2 + 2?", thought, "3 + 3?", thought)
        == [f"{thought.removeprefix('<think>')[1:]}<|im_end|>"] * 2
    )


def test_answer_without_opened_think_block_is_learned_without_header() -> None:
    tokenizer = ChatFormat(THINKING, "<|im_end|>", str).tokenizer()
    assert decode_learned(tokenizer, "2 + 2?", "Four.") == ["Four.<|im_end|>"]


def test_final_end_token_is_learned_with_the_last_answer() -> None:
    tokenizer = ChatFormat(PHI_3_MINI, "<|im_end|>", str).tokenizer()
    assert decode_learned(tokenizer, "2 + 2?", "Four.") == ["Four.<|end|>\n<|im_end|>"]


def test_final_end_token_keeps_labels_of_earlier_turns() -> None:
    tokenizer = ChatFormat(PHI_3_MINI, "<|im_end|>", str).tokenizer()
    assert decode_learned(tokenizer, "2 + 2?", "Four.", "3 + 3?", "Six.") == ["Four.<|end|>", "Six.<|end|>\n<|im_end|>"]


def test_end_token_that_strips_the_line_break_is_learned() -> None:
    tokenizer = ChatFormat(PHI_3_MEDIUM.replace("<|end|>", "<|ends|>"), "<|im_end|>", str).tokenizer()
    tokenizer.add_tokens([AddedToken("<|ends|>", rstrip=True, special=True, normalized=False)])
    assert decode_learned(tokenizer, "2 + 2?", "Four.", "3 + 3?", "Six.") == ["Four.<|ends|>", "Six.<|ends|>"]


def test_spaces_are_learned_if_the_tokenizer_trims_offsets() -> None:
    tokenizer = FORMATS["chatml"].tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    assert decode_learned(tokenizer, "Write it.", "def f():\n        return  1") == [
        "def f():\n        return  1<|im_end|>"
    ]


def test_byte_fallback_characters_are_learned_completely() -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=build_byte_fallback_tokenizer(), eos_token="</s>", bos_token="<s>", chat_template=LLAMA_2
    )
    assert decode_learned(tokenizer, "Open the file.", "naïve 漢 🎉", "And?", "the file") == [
        " naïve 漢 🎉 </s>",
        " the file </s>",
    ]


def build_byte_fallback_tokenizer() -> Tokenizer:
    """Build a tokenizer like that of Llama 2, Mistral and Gemma: ▁ for spaces, and byte fallback for unknown characters."""
    special_tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = BpeTrainer(vocab_size=400, special_tokens=special_tokens, show_progress=False)
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.train_from_iterator(SENTENCES, trainer)
    state = json.loads(tokenizer.to_str())
    state["model"].update(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    # Byte tokens belong to the vocabulary; they are not special tokens.
    state["added_tokens"] = state["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer
