"""A tiny causal language model for tests: a random two-layer Llama with a byte-level BPE tokenizer and a ChatML template.

It loads, trains and generates like any model in the Hugging Face layout, in milliseconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

BOS, EOS, UNKNOWN = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Training text of the tokenizer, so that common words are one or two tokens.
SENTENCES = (
    "system user assistant",
    "What does the function return when the list is empty? It returns None.",
    "Explain in one sentence what the module is for and name its main class.",
    "The quick brown fox jumps over the lazy dog, 0123456789 times.",
    "Open the file, read every line, and close it again when you are done.",
)


def tiny_model(folder: Path, *, seed: int = 0, head: int = 16) -> Path:
    """Write a random model (2 layers, 4 heads, float32 safetensors) into `folder` and return the folder.

    `head` is the head size; the hidden size is 4 times that. vLLM on a CPU supports heads of 64 but not of 16. Equal seeds give equal bytes.
    """
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=4 * head, intermediate_size=8 * head, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.25, tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig.from_model_config(model.config)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_tokenizer() -> Any:
    """Train the tokenizer of the tiny model; it covers all bytes, and ChatML markers are single tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[UNKNOWN, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        unk_token=UNKNOWN,
        chat_template=CHATML,
        model_max_length=2048,
    )
