"""How a model is packaged for Triton."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

GOLDEN_PROMPTS = (
    "What is the capital of France?",
    "Explain in one sentence what a Python dictionary is.",
    "Write a haiku about the sea.",
    'Translate to French: "Good morning, how are you?"',
    "What does the function os.path.join do?",
)

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"


class VllmConfig(BaseModel):
    """The section `triton_packaging.vllm`: what model.json tells vLLM beside the model."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())

    max_model_len: int = Field(
        0,
        ge=0,
        le=10_000_000,
        description="Longest prompt and answer together, in tokens; never above the model's context. 0: max_prompt_tokens + max_tokens.",
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Share of a GPU's memory that vLLM takes for weights and cache. More answers more requests at once."
    )
    tensor_parallel_size: int = Field(1, ge=1, le=1024, description="GPUs that share the model's weights.")
    enforce_eager: bool = Field(False, description="Leave CUDA graphs out: ready sooner and with less memory, but slower.")
    max_lora_rank: Literal[0, 8, 16, 32, 64, 128, 256, 320, 512] = Field(
        0, description="Highest rank of an attached adapter; vLLM sets memory aside for it. 0: the lowest that all packaged ones fit in."
    )
    max_loras: int = Field(
        0, ge=0, le=1024, description="Different adapters computed in one batch. 0: as many as the package has, up to 8."
    )


class TritonPackagingConfig(BaseModel):
    """The section `triton_packaging` of customization.yaml."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())

    backend: Literal["python", "vllm"] = Field(
        "python",
        description="The Triton backend that serves the model. python: tuneline's own, carried in the package, on CPUs and GPUs. vllm: "
        "Triton's vLLM backend, for GPUs, and for several adapters over one base.",
    )
    adapter: Literal["auto", "merged", "attached"] = Field(
        "auto",
        description="An adapter's place: merged into the weights, or attached to them when the model is loaded. auto: merged for python, "
        "attached for vllm, and attached where it cannot be merged (virtual tokens).",
    )
    weights: Literal["copied", "referenced"] = Field(
        "copied",
        description="copied: the package holds its weights, as links where it can. referenced: it holds only where full weights, or base "
        "and adapter, lie, and what they are; they must stay there.",
    )
    publish_to: str = Field(
        "",
        pattern=r"^(/.*|s3://[a-z0-9][a-z0-9.-]+(/[0-9A-Za-z._/-]*)?)?$",
        description="Folder or s3://bucket/prefix to which the finished package is copied too, for a cluster's Triton; it lies there under "
        "its content digest.",
    )
    vllm: VllmConfig = Field(VllmConfig(), description="What vLLM is told, where it is the backend.")
    serving_root: str = Field(
        "",
        pattern=r"^(/.*)?$",
        description="Folder in which a cluster's Triton finds this package, such as /models, for the paths in a vLLM package. "
        "Empty: paths are relative, and the server is started in the package's folder, as `tuneline serve` does.",
    )
    model_name: str = Field(
        "tuneline",
        pattern=NAME_PATTERN,
        max_length=100,
        description="The model's name in Triton, part of every request's URL: letters, digits, dots, dashes and underscores.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Number format of merged weights and of GPU arithmetic. auto: bfloat16 where this machine has a GPU, else float32. "
        "On CPUs the arithmetic is always float32, which is many times faster there.",
    )
    max_prompt_tokens: int = Field(
        4096,
        ge=1,
        le=10_000_000,
        description="Longest prompt a request may bring, in tokens, the chat template's counted; never above the model's context.",
    )
    max_tokens: int = Field(
        1024, ge=1, le=10_000_000, description="Most tokens a request may ask for. A request that names none gets default_max_tokens."
    )
    default_max_tokens: int = Field(256, ge=1, le=10_000_000, description="Tokens generated at most when a request does not say.")
    slots: int = Field(
        16,
        ge=1,
        le=1024,
        description="Requests computed together. More give more throughput and need more memory.",
    )
    max_queue: int = Field(
        64,
        ge=0,
        le=100_000,
        description="Requests that may wait for a slot; further ones are refused with UNAVAILABLE.",
    )
    cache_tokens: int = Field(
        0,
        ge=0,
        le=1_000_000_000,
        description="Tokens of the cache that the requests computed together share, prompts and answers; never less than one longest "
        "request has. 0: enough for all slots at their longest, within 1 GiB.",
    )
    threads: int = Field(0, ge=0, le=1024, description="CPU threads the served model computes with. 0: all cores the server may use.")
    prove: bool = Field(
        True,
        description="Load the package in a real Triton server and compare its answers. An unproven package cannot be promoted.",
    )
    golden_prompts: list[str] = Field(
        list(GOLDEN_PROMPTS),
        min_length=1,
        max_length=100,
        description="Prompts whose greedy answers must be the same from Triton and from transformers.",
    )
    golden_max_tokens: int = Field(
        24, ge=1, le=4096, description="Tokens compared for each golden prompt; more takes longer and proves more."
    )
    ready_timeout_seconds: float = Field(
        300.0, gt=0, le=86_400, description="How long the server may take to load the package, in seconds, before the proof fails."
    )

    @field_validator("golden_prompts")
    @classmethod
    def _no_empty_prompt(cls, prompts: list[str]) -> list[str]:
        if any(not prompt.strip() for prompt in prompts):
            raise ValueError("a golden prompt is empty")
        return prompts
