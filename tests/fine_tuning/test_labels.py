"""Which tokens are learned: in each of the chat formats in use, packed or not, the assistant's and no others, up to the gradient."""

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

from components.common import chat
from components.common.artifacts import Artifact
from components.common.progress import Silent
from components.fine_tuning import trainers
from components.fine_tuning.objectives import IGNORED
from components.fine_tuning.stage import finetune
from components.fine_tuning.tokens import Tokenised
from tests.fine_tuning.made import Row, dataset_with, flat, micro_batch, model_for, pieces, prepared, recipe, talk
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
MARKS = [
    "<s>", "</s>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<bos>", "<start_of_turn>",
    "<end_of_turn>", "<|user|>", "<|system|>", "<|assistant|>", "<|end|>", "<think>", "</think>",
]  # fmt: skip


@dataclass(frozen=True)
class Format:
    """A chat format: its template, its beginning and end of a sequence, and how an answer is written where it is to be learned."""

    template: str
    eos: str
    learned: Callable[[str], str]
    bos: str = "<s>"
    system: bool = True
    tools: bool = False

    def tokenizer(self) -> Any:
        tokenizer = tiny_tokenizer()
        tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
        tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = self.bos, self.eos, self.eos
        tokenizer.chat_template = self.template
        return tokenizer


FORMATS = {
    "chatml": Format(CHATML, "<|im_end|>", "{}<|im_end|>".format, "<|im_start|>", tools=True),
    "llama-3": Format(LLAMA_3, "<|eot_id|>", "{}<|eot_id|>".format, "<|begin_of_text|>"),
    "llama-2": Format(LLAMA_2, "</s>", " {} </s>".format),
    "mistral": Format(MISTRAL, "</s>", "{}</s>".format, system=False),
    "gemma": Format(GEMMA, "<end_of_turn>", "{}<end_of_turn>".format, "<bos>", system=False),
    "phi-3": Format(PHI_3_MEDIUM, "<|end|>", "{}<|end|>".format, system=False),
    "zephyr": Format(ZEPHYR, "</s>", "{}</s>".format),
    "alpaca": Format(ALPACA, "</s>", "{}</s>".format),
    "plain": Format(chat.PLAIN_TEMPLATE, "</s>", " {}</s>".format),
    "indented": Format(INDENTED, "</s>", " {}</s>".format),
}
TOOLS = json.dumps([{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}])
each_format = pytest.mark.parametrize("name", FORMATS)
packed_or_not = pytest.mark.parametrize("packing", [False, True], ids=["alone", "packed"])


def rows(kind: Format) -> list[Row]:
    """Conversations of one and of several turns, with all that the format can write."""
    system = "Be brief. Sé breve." if kind.system else ""
    called = talk("tool", "What is 2 + 2?", '{"name": "add"}', system=system, tools=TOOLS)
    called["messages"] += [{"role": "tool", "content": "4"}, {"role": "assistant", "content": "It is 4."}]
    return [
        talk("turns", "What is 2 + 2?", "Four.", "And 3 + 3?", "Six, naïvely.", "And in 漢字?", "六 🎉\n  ist   richtig.", system=system),
        talk("one", "Wie heißt die Klasse?", "Sie heißt `Größe`."),
        talk("short", "Open the file.", "It returns None.", system=system),
        *([called] if kind.tools else []),
    ]


def answers(row: Row) -> list[str]:
    return [str(message["content"]) for message in row["messages"] if message["role"] == "assistant"]


def learned_runs(tokenizer: Any, ids: list[int], labels: list[int]) -> list[str]:
    """What is learned, decoded: one text for each run of labels. A label is its own token or none."""
    assert all(label in (token, IGNORED) for token, label in zip(ids, labels, strict=True))
    return [str(tokenizer.decode(list(run))) for is_learned, run in groupby(labels, lambda label: label != IGNORED) if is_learned]


@dataclass(frozen=True)
class Case:
    """A format with its rows as tokens, and the tiny model."""

    kind: Format
    rows: dict[str, Row]
    tokenizer: Any
    splits: Tokenised
    model: Any
    batch: Any

    def examples(self) -> list[tuple[list[int], list[int]]]:
        """The tokens and labels of each row, in the order in which they lie in the batch."""
        both = [zip(pieces(one), pieces(one, "labels"), strict=True) for one in self.splits.train.dataset]
        return [pair for some in both for pair in some]

    def ids(self) -> list[str]:
        return self.splits.train.ids(range(len(self.splits.train.lengths)))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads cost more than they bring in so small a model, and on a busy machine several times as much."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def model(tiny: Path) -> Any:
    return model_for(FORMATS["chatml"].tokenizer(), tiny)  # all formats' marks are in all tokenizers


@pytest.fixture(scope="module")
def cases(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Case]:
    @cache
    def made(name: str, packing: bool) -> Case:
        kind, config, folder = FORMATS[name], recipe(packing=packing), tmp_path_factory.mktemp(name)
        tokenizer, given = kind.tokenizer(), rows(kind)
        splits = prepared(dataset_with(folder / "dataset", "sft", given), tokenizer, folder, config)
        return Case(kind, {row["id"]: row for row in given}, tokenizer, splits, model, micro_batch(splits.train, config, tokenizer))

    return made


@pytest.fixture
def case(name: str, packing: bool, cases: Callable[[str, bool], Case]) -> Case:
    return cases(name, packing)


@each_format
@packed_or_not
def test_every_turn_of_the_assistant_with_its_end_is_learned_and_nothing_else(case: Case, packing: bool) -> None:
    assert len(case.ids()) == len(case.rows)
    assert (len(case.splits.train.lengths) < len(case.rows)) == packing
    for name, (ids, labels) in zip(case.ids(), case.examples(), strict=True):
        expected = [case.kind.learned(answer) for answer in answers(case.rows[name])]
        assert learned_runs(case.tokenizer, ids, labels) == expected
        row = case.rows[name]
        rendered = chat.render(case.tokenizer, row["messages"], json.loads(row["tools"]) if row["tools"] else None)
        assert case.tokenizer.decode(ids) == rendered, "the rest of the conversation stands around it"


def losses_alone(model: Any, ids: list[int], labels: list[int]) -> torch.Tensor:
    """The negative log-likelihood of each labelled token of a row, from all logits of the row by itself."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0]
    likelihoods = logits.log_softmax(-1)
    counted = [i for i, label in enumerate(labels) if i > 0 and label != IGNORED]
    return -torch.stack([likelihoods[i - 1, ids[i]] for i in counted])


def mean_alone(model: Any, examples: list[tuple[list[int], list[int]]]) -> float:
    return float(torch.cat([losses_alone(model, *example) for example in examples]).mean())


@each_format
@packed_or_not
def test_the_loss_is_the_mean_over_the_answer_tokens_of_the_rows_alone(case: Case) -> None:
    loss = trainers._loss_of_answers(case.model, case.batch, None)
    assert loss.item() == pytest.approx(mean_alone(case.model, case.examples()), abs=1e-5)


@each_format
@packed_or_not
def test_the_gradient_reaches_every_token_of_the_answers_and_none_of_the_prompts(case: Case) -> None:
    reached = positions_reached(case.model, case.batch)
    labels = [[IGNORED, *labels[1:]] for _, labels in case.examples()]  # nothing foretells a row's first token
    following = [*flat(labels)[1:], IGNORED]
    assert reached == [label != IGNORED for label in following]


def positions_reached(model: Any, batch: Any) -> list[bool]:
    """Whether the loss has a gradient in what the output head makes its logits of, by position."""
    seen: list[Any] = []
    hook = model.model.norm.register_forward_hook(lambda _, __, output: seen.append(output))
    loss = trainers._loss_of_answers(model, batch, None)
    hook.remove()
    (hidden,) = seen
    hidden.retain_grad()
    loss.backward()
    return [bool(one) for one in hidden.grad[0].abs().sum(-1) > 0]


@packed_or_not
def test_of_plain_text_every_token_counts_but_the_first_of_each_row(packing: bool, model: Any, tmp_path: Path) -> None:
    tokenizer, config = FORMATS["chatml"].tokenizer(), recipe(packing=packing, objective="text")
    texts = [{"id": str(i), "text": said} for i, said in enumerate(["Open the file.", "Naïve 漢字 🎉", "It returns None."])]
    splits = prepared(dataset_with(tmp_path / "dataset", "text", texts), tokenizer, tmp_path, config)
    examples = [(ids, ids) for one in splits.train.dataset for ids in pieces(one)]
    batch = micro_batch(splits.train, config, tokenizer)
    assert trainers._loss_of_answers(model, batch, None).item() == pytest.approx(mean_alone(model, examples), abs=1e-5)
    inside = flat([[1] * (len(ids) - 1) + [0] for ids, _ in examples])
    assert positions_reached(model, batch) == [bool(one) for one in inside]


@packed_or_not
def test_micro_batches_of_a_step_add_up_to_the_mean_over_all_their_answer_tokens(packing: bool, model: Any, tmp_path: Path) -> None:
    tokenizer, config = FORMATS["chatml"].tokenizer(), recipe(packing=packing, max_length=100)
    splits = prepared(dataset_with(tmp_path / "dataset", "sft", rows(FORMATS["chatml"])), tokenizer, tmp_path, config)
    collate = trainers.collator(config, tokenizer)
    batches = [collate([example]) for example in splits.train.dataset]
    assert len(batches) > 1
    items = sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)
    examples = [pair for one in splits.train.dataset for pair in zip(pieces(one), pieces(one, "labels"), strict=True)]
    total = sum(trainers._loss_of_answers(model, batch, items).item() for batch in batches)
    assert total == pytest.approx(mean_alone(model, examples), abs=1e-5)


def test_padding_is_never_learned_though_its_token_is_the_end_of_a_turn(model: Any, tmp_path: Path) -> None:
    tokenizer, config = FORMATS["chatml"].tokenizer(), recipe(adaptation="prompt_tuning")
    splits = prepared(dataset_with(tmp_path / "dataset", "sft", rows(FORMATS["chatml"])), tokenizer, tmp_path, config)
    batch = micro_batch(splits.train, config, tokenizer)
    assert tokenizer.pad_token == tokenizer.eos_token
    for example, ids, labels in zip(splits.train.dataset, batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        assert learned_runs(tokenizer, ids, labels) == learned_runs(tokenizer, example["input_ids"], example["labels"])
    examples = [(list(one["input_ids"]), list(one["labels"])) for one in splits.train.dataset]
    with torch.no_grad():
        assert float(model(**batch).loss) == pytest.approx(mean_alone(model, examples), abs=1e-5)


def tuned(dataset: Artifact, tiny: Path, folder: Path, **changes: object) -> dict[str, float]:
    """The losses with which a training begins that takes one step over four rows."""
    values = {"base_model": str(tiny), "max_steps": 1, "batch_size": 4, "max_length": 120, "lora": {"dropout": 0}, **changes}
    made = finetune(dataset, folder / "model", recipe(**values), seed=0, state=folder / "state", reporter=Silent())
    log = [json.loads(line) for line in (made.path / "training.jsonl").read_text().splitlines()]
    names = ("validation_loss", "train_loss")
    return {name: next(line[name] for line in log if name in line) for name in names}


def four_rows(folder: Path) -> tuple[Artifact, list[tuple[list[int], list[int]]]]:
    """Rows whose answers differ much in length, for training and for validation, and their tokens and labels."""
    four = [talk(str(i), "What is it?", "It is " + "the list " * i * i, "And?", "None.") for i in range(1, 5)]
    encoded = [chat.encode(tiny_tokenizer(), row["messages"], max_length=200) for row in four]
    labelled = [(one.input_ids, [t if a else IGNORED for t, a in zip(one.input_ids, one.answer, strict=True)]) for one in encoded]
    return dataset_with(folder / "dataset", "sft", four, four), labelled


@packed_or_not
def test_a_training_and_its_validation_begin_at_the_loss_of_the_answers_alone(packing: bool, tiny: Path, tmp_path: Path) -> None:
    dataset, examples = four_rows(tmp_path)
    begun = tuned(dataset, tiny, tmp_path, packing=packing, micro_batch_size=4)
    expected = mean_alone(model_for(tiny_tokenizer(), tiny), examples)
    assert begun == {name: pytest.approx(expected, abs=1e-4) for name in begun}


@pytest.fixture(scope="module")
def one_by_one(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, float], float]:
    """The losses with which a training in micro-batches of one row begins, and that of all the answers' tokens."""
    folder = tmp_path_factory.mktemp("one-by-one")
    dataset, examples = four_rows(folder)
    return tuned(dataset, tiny, folder, micro_batch_size=1), mean_alone(model_for(tiny_tokenizer(), tiny), examples)


def test_the_loss_of_a_step_is_that_of_its_answers_however_it_is_cut_into_micro_batches(
    one_by_one: tuple[dict[str, float], float],
) -> None:
    begun, expected = one_by_one
    assert begun["train_loss"] == pytest.approx(expected, abs=1e-4)


def test_the_validation_loss_is_that_of_its_answers_however_it_is_cut_into_micro_batches(
    one_by_one: tuple[dict[str, float], float],
) -> None:
    begun, expected = one_by_one
    assert begun["validation_loss"] == pytest.approx(expected, abs=1e-4)


def learned_of(tokenizer: Any, *turns: str) -> list[str]:
    encoded = chat.encode(tokenizer, talk("any", *turns)["messages"], max_length=1000)
    labels = [token if answer else IGNORED for token, answer in zip(encoded.input_ids, encoded.answer, strict=True)]
    return learned_runs(tokenizer, encoded.input_ids, labels)


def test_an_answer_that_thinks_is_learned_from_where_the_prompt_ends() -> None:
    tokenizer = Format(THINKING, "<|im_end|>", str).tokenizer()
    thought = "<think>\nTwo and two.\n</think>\n\nFour."
    assert learned_of(tokenizer, "2 + 2?", thought, "3 + 3?", thought) == [f"{thought.removeprefix('<think>')[1:]}<|im_end|>"] * 2


def test_an_answer_without_the_thought_its_prompt_opens_is_learned_without_its_header() -> None:
    tokenizer = Format(THINKING, "<|im_end|>", str).tokenizer()
    assert learned_of(tokenizer, "2 + 2?", "Four.") == ["Four.<|im_end|>"]


def test_the_mark_that_a_template_writes_behind_a_conversation_is_learned_with_the_last_answer() -> None:
    tokenizer = Format(PHI_3_MINI, "<|im_end|>", str).tokenizer()
    assert learned_of(tokenizer, "2 + 2?", "Four.") == ["Four.<|end|>\n<|im_end|>"]


def test_the_mark_that_a_template_writes_behind_a_conversation_does_not_hide_its_earlier_turns() -> None:
    tokenizer = Format(PHI_3_MINI, "<|im_end|>", str).tokenizer()
    assert learned_of(tokenizer, "2 + 2?", "Four.", "3 + 3?", "Six.") == ["Four.<|end|>", "Six.<|end|>\n<|im_end|>"]


def test_a_mark_that_takes_the_line_break_behind_it_is_learned() -> None:
    tokenizer = Format(PHI_3_MEDIUM.replace("<|end|>", "<|ends|>"), "<|im_end|>", str).tokenizer()
    tokenizer.add_tokens([AddedToken("<|ends|>", rstrip=True, special=True, normalized=False)])
    assert learned_of(tokenizer, "2 + 2?", "Four.", "3 + 3?", "Six.") == ["Four.<|ends|>", "Six.<|ends|>"]


def test_spaces_are_learned_where_the_tokenizer_trims_its_offsets() -> None:
    tokenizer = FORMATS["chatml"].tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    assert learned_of(tokenizer, "Write it.", "def f():\n        return  1") == ["def f():\n        return  1<|im_end|>"]


def test_letters_that_only_bytes_can_write_are_learned_whole() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=sentencepieces(), eos_token="</s>", bos_token="<s>", chat_template=LLAMA_2)
    assert learned_of(tokenizer, "Open the file.", "naïve 漢 🎉", "And?", "the file") == [" naïve 漢 🎉 </s>", " the file </s>"]


def sentencepieces() -> Tokenizer:
    """A tokenizer as Llama 2, Mistral and Gemma have it: spaces written as ▁, and bytes for what it does not know."""
    marks = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    learner = BpeTrainer(vocab_size=400, special_tokens=marks, show_progress=False)
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.train_from_iterator(SENTENCES, learner)
    written = json.loads(tokenizer.to_str())
    written["model"].update(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    written["added_tokens"] = written["added_tokens"][:3]  # bytes are words of the model, not marks
    tokenizer = Tokenizer.from_str(json.dumps(written))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer
