"""Tiny random models of the model families that users tune: the rows of the matrix in docs/how-to/models.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.tiny import tiny_tokenizer


@dataclass(frozen=True)
class Family:
    """A model family. `sizes` are the entries of the configuration that differ from SIZES; None removes one of SIZES."""

    name: str
    model_type: str
    sizes: dict[str, Any] = field(default_factory=dict)


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
STATE_SPACE = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}
FAMILIES = (
    Family("Llama 2 and 3", "llama"),
    Family(
        "Llama 4 (text)",
        "llama4_text",
        {"head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 1},
    ),
    Family("Mistral", "mistral", {"head_dim": 8}),
    Family("Mixtral", "mixtral", {"num_local_experts": 4}),
    Family("Qwen2", "qwen2"),
    Family("Qwen3", "qwen3", {"head_dim": 8}),
    Family("Qwen3-MoE", "qwen3_moe", {**EXPERTS, "head_dim": 8, "num_experts": 4}),
    Family(
        "Qwen3-Next",
        "qwen3_next",
        {
            **EXPERTS,
            "head_dim": 8,
            "num_experts": 4,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    Family("Gemma", "gemma", {"head_dim": 8}),
    Family("Gemma 2", "gemma2", {"head_dim": 8, "query_pre_attn_scalar": 8}),
    Family("Gemma 3 (text)", "gemma3_text", {"head_dim": 8, "query_pre_attn_scalar": 8}),
    Family("Phi 1.5 and 2", "phi"),
    Family("Phi 3 and 4", "phi3"),
    Family("Phi 3.5 MoE", "phimoe", {"num_local_experts": 4}),
    Family("GPT-OSS", "gpt_oss", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    Family("OLMo", "olmo"),
    Family("OLMo 2", "olmo2"),
    Family("OLMo 3", "olmo3"),
    Family("OLMoE", "olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    Family("SmolLM3", "smollm3"),
    Family("Granite", "granite"),
    Family("Granite MoE", "granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Family(
        "Granite 4 (hybrid)",
        "granitemoehybrid",
        {
            **STATE_SPACE,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            "layer_types": ["mamba", "attention"],
        },
    ),
    Family("Falcon", "falcon", {"num_key_value_heads": None, "intermediate_size": None}),
    Family("Bloom", "bloom", dict.fromkeys(("intermediate_size", "num_key_value_heads", "max_position_embeddings"))),
    Family("StableLM", "stablelm"),
    Family("Command R", "cohere"),
    Family("Command R7B and A", "cohere2", {"head_dim": 8}),
    Family("DeepSeek V2", "deepseek_v2", {**EXPERTS, **LATENT_ATTENTION}),
    Family("DeepSeek V3 and R1", "deepseek_v3", {**EXPERTS, **LATENT_ATTENTION}),
    Family(
        "Jamba",
        "jamba",
        {
            "num_experts": 4,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "use_mamba_kernels": False,
        },
    ),
    Family(
        "Mamba",
        "mamba",
        {
            "state_size": 8,
            "time_step_rank": 4,
            "intermediate_size": 64,
            **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "max_position_embeddings")),
        },
    ),
    Family(
        "Mamba 2",
        "mamba2",
        {
            "state_size": 8,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 1,
            "chunk_size": 16,
            **dict.fromkeys(
                ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
            ),
        },
    ),
)


def build_configuration(family: Family, tokenizer: Any = None) -> Any:
    """Return the transformers configuration of a family's tiny model. Default: without the tokens of a tokenizer."""
    from transformers import AutoConfig

    sizes = {name: value for name, value in {**SIZES, **family.sizes}.items() if value is not None}
    tokens = {name: getattr(tokenizer, name, 0) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return AutoConfig.for_model(family.model_type, **sizes, **tokens, vocab_size=len(tokenizer) if tokenizer else 400)


def write_model(family: Family, folder: Path) -> Path:
    """Write a family's tiny random model and its tokenizer into `folder`, and return the folder."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = tiny_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(build_configuration(family, tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
