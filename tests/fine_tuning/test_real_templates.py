"""Learned tokens with the chat templates of published models that TRL ships, and with its training variants of them.

The expected tokens do not come from a rendered conversation: the prompt of each answer is rendered as a server does,
and `FORMATS` states the text that the model writes after it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import trl
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from components.common.models import chat_templates, tool_messages
from components.common.runtime.errors import InputError
from components.fine_tuning import objectives

FOLDER = Path(trl.__file__).parent / "chat_templates"
SPECIAL_TOKEN = re.compile(r"<\|?[a-zA-Z_/][\w/ ]*\|?>|<\w*\|>|<｜[^｜]+｜>|\[gMASK\]|\[/?INST\]")
THOUGHT = "<think>\n{thought}\n</think>\n\n{answer}"


@dataclass(frozen=True)
class Format:
    """The texts that a model writes.

    Attributes:
        written: An answer with its end of turn.
        reasoned: An answer with reasoning; by default the reasoning is part of the answer. Text before ^ is the end of
            the prompt, which the template omits if an answer follows.
        final: Text that the template appends to the last answer.
        system: Whether the template accepts a system prompt.
        eos: The end-of-sequence token; by default the end of `written`.
    """

    written: str
    reasoned: str = ""
    final: str = ""
    system: bool = True
    eos: str = ""


CHATML = Format("{answer}<|im_end|>")
GEMMA_4 = Format("{answer}<turn|>")
LLAMA_3 = Format("{answer}<|eot_id|>")
NEMOTRON_3 = Format("\n^</think>{answer}<|im_end|>", "{thought}\n</think>\n\n{answer}<|im_end|>")
OPENED_THINKING = Format("\n</think>\n\n{answer}<|im_end|>", "{thought}\n</think>\n\n{answer}<|im_end|>")
PHI_3 = Format("{answer}<|end|>", final="\n<|endoftext|>", eos="<|endoftext|>")
DEEPSEEK = Format("<think>\n^{answer}<｜end▁of▁sentence｜>", "<think>\n^\n\n{answer}<｜end▁of▁sentence｜>")
GLM_4_5 = Format("\n<think></think>\n{answer}", "\n<think>{thought}</think>\n{answer}", eos="<|endoftext|>")
FORMATS = {
    "cohere": Format("{answer}<|END_OF_TURN_TOKEN|>"),
    "cohere2": Format("{answer}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", eos="<|END_OF_TURN_TOKEN|>"),
    **dict.fromkeys(("deepseek_r1_distill", "deepseekv3"), DEEPSEEK),
    "deepseek_r1_distill_training": Format(DEEPSEEK.written, "{thought}\n</think>\n\n{answer}<｜end▁of▁sentence｜>"),
    "diffusion_gemma": GEMMA_4,
    "gemma": Format("{answer}<end_of_turn>", system=False),
    "gemma3": Format("{answer}<end_of_turn>"),
    **dict.fromkeys(("gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5"), GEMMA_4),
    "glm4moe": GLM_4_5,
    "gptoss": Format("<|channel|>final<|message|>{answer}<|return|>"),
    **dict.fromkeys(("lfm2", "lfm2_v2", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"), CHATML),
    **dict.fromkeys(("llama3", "llama3_1", "llama3_2"), LLAMA_3),
    "muse_glimmer": Format(" to=user<|message|>{answer}<|eot|>"),
    **dict.fromkeys((f"nemotron_3_{name}" for name in ("5_lightning", "nano", "super", "ultra")), NEMOTRON_3),
    **dict.fromkeys(("phi3", "phi3_5"), PHI_3),
    **dict.fromkeys(("qwen2_5", "qwen2_5_vl", "qwen3_instruct_2507", "qwen3_vl"), CHATML),
    "qwen3": Format("<think>\n\n</think>\n\n{answer}<|im_end|>", THOUGHT + "<|im_end|>"),
    "qwen3_5_nothink": Format(CHATML.written, "\n</think>\n\n^" + OPENED_THINKING.reasoned),
    **dict.fromkeys(("qwen3_5_think", "qwen3_6"), OPENED_THINKING),
    "qwen3_8": Format(OPENED_THINKING.written),
}
PARTS_ONLY = ("idefics3", "llava_next", "smolvlm")  # they accept a list of parts as content, and no text
# They refuse or omit the result of a tool after a call that is text.
WITHOUT_TOOL_RESULTS = {"diffusion_gemma", "gemma", "gptoss"}
WITHOUT_TOOL_RESULTS |= {"gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "A term."}}},
        },
    }
]
TEMPLATES = [path.stem for path in sorted(FOLDER.glob("*.jinja")) if path.stem.removesuffix("_training") in FORMATS]
# Answers with inner white space, several scripts and, in the last conversation, reasoning.
CONVERSATIONS: dict[str, tuple[str, list[str]]] = {
    "one turn": ("", ["Four."]),
    "several turns": ("", ["Four, naïvely.", "六 🎉\n\n- and\n  - so  on", "Six."]),
    "system prompt": ("Be brief.", ["Four.", "Six."]),
    "reasoning": ("", ["Two and two.|Four.", "Half of\n\ntwelve.|Six."]),
}


def get_format(name: str) -> Format:
    chat_format = FORMATS.get(name, FORMATS[name.removesuffix("_training")])
    if name == "glm4moe_training":  # the variant teaches the token at which GLM 4.5 stops
        return Format(GLM_4_5.written + "<|user|>", GLM_4_5.reasoned + "<|user|>", eos=GLM_4_5.eos)
    return chat_format


@cache
def build_byte_tokenizer() -> str:
    """Build a tokenizer with one token per byte, so that the tokens of a text are those of its parts."""
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return str(tokenizer.to_str())


def load_tokenizer(name: str) -> Any:
    """Load a tokenizer that has the template and a token for each special token in it."""
    template, chat_format = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8"), get_format(name)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(build_byte_tokenizer()),
        bos_token="<s>",
        eos_token=chat_format.eos or chat_format.written.rpartition("}")[2],
        chat_template=template,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(SPECIAL_TOKEN.findall(template)))})
    return tokenizer


def build_messages(system: str, answers: list[str]) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": system}] if system else []
    for i, answer in enumerate(answers):
        content = THOUGHT.format(thought=answer.split("|")[0], answer=answer.split("|")[1]) if "|" in answer else answer
        messages += [{"role": "user", "content": f"What is 2 + {i}?"}, {"role": "assistant", "content": content}]
    return messages


def list_expected(
    name: str, tokenizer: Any, messages: list[dict[str, str]], tools: Any = None
) -> list[tuple[list[int], list[int]]]:
    """Return for each answer the tokens of the prompt that a server sends, and those that the model writes."""
    chat_format, expected = get_format(name), []
    for position, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = messages[:position]
        prompt = tokenizer.apply_chat_template(before, tools=tools, add_generation_prompt=True, tokenize=False)
        parts = re.fullmatch(r"<think>\n(.*)\n</think>\n\n(.*)", message["content"], re.DOTALL)
        if parts and chat_format.reasoned:
            omitted, _, written = chat_format.reasoned.format(thought=parts[1], answer=parts[2]).rpartition("^")
        else:
            omitted, _, written = chat_format.written.format(answer=message["content"]).rpartition("^")
        if before[-1]["role"] == "user":  # after the result of a tool, DeepSeek's templates open no turn
            assert prompt.endswith(omitted)
        if position == len(messages) - 1:
            written += chat_format.final
        prompt = prompt.removesuffix(omitted)
        expected.append(tuple(tokenizer(part, add_special_tokens=False)["input_ids"] for part in (prompt, written)))
    return expected


def list_learned(
    tokenizer: Any, messages: list[dict[str, str]], tools: Any = None
) -> list[tuple[list[int], list[int]]]:
    """Return for each learned answer of all examples the tokens before it and its tokens."""
    learned = []
    for encoded in chat_templates.encode_answers(tokenizer, messages, tools, max_length=100_000):
        assert len(encoded.input_ids) == len(encoded.answer_mask)
        position = 0
        for is_answer, run in groupby(encoded.answer_mask):
            end = position + len(list(run))
            if is_answer:
                learned.append((encoded.input_ids[:position], encoded.input_ids[position:end]))
            position = end
    return learned


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_answer_is_learned_after_the_prompt_of_a_server(name: str) -> None:
    tokenizer = load_tokenizer(name)
    for system, answers in CONVERSATIONS.values():
        if system and not get_format(name).system:
            continue
        messages = build_messages(system, answers)
        assert list_learned(tokenizer, messages) == list_expected(name, tokenizer, messages)


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_of_tools_and_answers_after_their_results_are_learned(name: str) -> None:
    """A call is text, as in the rows of a dataset. A system message describes tools that the template has no place for."""
    tokenizer, messages = load_tokenizer(name), build_messages("", ['{"name": "add"}', "Six."])
    messages[2:2] = [{"role": "tool", "content": "4"}, {"role": "assistant", "content": "It is 4."}]
    if name.removesuffix("_training") in WITHOUT_TOOL_RESULTS:
        with pytest.raises(InputError, match=r"omits the text of messages|rejects a conversation"):
            list_learned(tokenizer, messages, TOOLS)
    elif tool_messages.has_tool_template(tokenizer):
        assert list_learned(tokenizer, messages, TOOLS) == list_expected(name, tokenizer, messages, TOOLS)
    else:
        described = tool_messages.describe_tools(messages, TOOLS)
        assert list_learned(tokenizer, messages, TOOLS) == list_expected(name, tokenizer, described)


PAIR = {
    "prompt": [{"role": "user", "content": "What is 2 + 2?"}],
    "chosen": [{"role": "assistant", "content": "Four, naïvely."}],
    "rejected": [{"role": "assistant", "content": THOUGHT.format(thought="Hm.", answer="Five.")}],
}
PAIR_OF_TURNS = PAIR | {"prompt": [*PAIR["prompt"], *PAIR["chosen"], {"role": "user", "content": "六 🎉?"}]}


@pytest.mark.parametrize("name", [name for name in TEMPLATES if not name.endswith("_training")])
def test_preference_tokens_are_those_of_trl_without_white_space_after_the_answers(name: str) -> None:
    tokenizer = load_tokenizer(name)
    for row in (PAIR, PAIR_OF_TURNS):
        labelled: dict[str, Any] = {"prompt": row["prompt"], "completion": row["rejected"], "label": False}
        for method, objective, given in (
            ("DPO", objectives.OBJECTIVES["dpo"], row),
            ("KTO", objectives.OBJECTIVES["kto"], labelled),
        ):
            arguments = getattr(trl, f"{method}Config")(bf16=False, report_to=[], max_length=None)
            rows = datasets.Dataset.from_list([given])
            prepare = getattr(trl, f"{method}Trainer")._prepare_dataset
            (reference,) = prepare(SimpleNamespace(calculate_KL=False), rows, tokenizer, arguments, "train")
            (example,) = objective.encode(tokenizer, given, 10_000).examples
            assert example["prompt_ids"] == reference["prompt_ids"]
            for answer in {"chosen_ids", "rejected_ids", "completion_ids"} & example.keys():
                length = len(example[answer])
                assert example[answer] == reference[answer][:length]
                assert tokenizer.decode(reference[answer][length:]).strip() == ""


@pytest.mark.parametrize("name", PARTS_ONLY)
def test_template_without_texts_is_refused(name: str) -> None:
    template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer = load_tokenizer("llama3")
    tokenizer.chat_template = template
    with pytest.raises(InputError, match=r"omits the text of messages|rejects a conversation"):
        chat_templates.encode_answers(tokenizer, build_messages("", ["Four."]), max_length=1000)


def test_many_templates_of_models_are_tested() -> None:
    variants = [name for name in TEMPLATES if name.endswith("_training")]
    assert len(set(TEMPLATES) - set(variants)) >= 38
    assert len({(FOLDER / f"{name}.jinja").read_bytes() for name in TEMPLATES}) >= 60
