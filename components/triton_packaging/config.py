"""Configuration of Triton packaging."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from components.common.gate_rules import MAX_QUANTIZATION_MARGIN, MIN_QUANTIZATION_ITEMS
from components.common.models.quantizations import QuantizationName, find_quantization
from components.common.runtime.errors import ConfigurationError

GOLDEN_PROMPTS = (
    "What is the capital of France?",
    "Explain in one sentence what a Python dictionary is.",
    "Write a haiku about the sea.",
    'Translate to French: "Good morning, how are you?"',
    "What does the function os.path.join do?",
)

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"


class VllmConfig(BaseModel):
    """The section `triton_packaging.vllm`: vLLM's engine arguments in model.json."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())

    max_model_len: int = Field(
        0,
        ge=0,
        le=10_000_000,
        description="Maximum length of prompt and answer together, in tokens; limited by the model's context. 0: "
        "max_prompt_tokens + max_tokens.",
    )
    gpu_memory_utilization: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of a GPU's memory for weights and cache. A larger cache holds more concurrent requests.",
    )
    quantization: Literal["", "awq", "bitsandbytes", "compressed-tensors", "fp8", "gptq"] = Field(
        "",
        description="Quantization of the weights in vLLM. Empty: the method in the weights' config.json, or none.",
    )
    tensor_parallel_size: int = Field(1, ge=1, le=1024, description="Number of GPUs that share the model's weights.")
    enforce_eager: bool = Field(
        False,
        description="Disable CUDA graphs. The model then starts faster and needs less memory, but answers more slowly.",
    )
    max_lora_rank: Literal[0, 8, 16, 32, 64, 128, 256, 320, 512] = Field(
        0,
        description="Highest rank of an attached adapter; vLLM reserves memory for this rank. 0: the lowest rank that "
        "fits all packaged adapters.",
    )
    max_loras: int = Field(
        0,
        ge=0,
        le=1024,
        description="Maximum number of different adapters in one batch. 0: all adapters of the package, up to 8.",
    )


class TritonPackagingConfig(BaseModel):
    """The section `triton_packaging` of customization.yaml."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())

    backend: Literal["python", "vllm"] = Field(
        "python",
        description="Triton backend that serves the model. python: tuneline's code in the package, on CPUs and GPUs. "
        "vllm: Triton's vLLM backend, for GPUs and for several adapters of one base model.",
    )
    adapter: Literal["auto", "merged", "attached"] = Field(
        "auto",
        description="Merge an adapter into the weights, or attach it when the model is loaded. "
        "auto: merged for python and for quantized weights; attached for vllm, and for adapters that cannot be merged "
        "(virtual tokens).",
    )
    weights: Literal["copied", "referenced"] = Field(
        "copied",
        description="copied: store the weights in the package, as links if possible. referenced: store only the paths "
        "and digests of the folders with the weights (of the model, or of the base model and the adapter). Do not move "
        "these folders.",
    )
    publish_to: str = Field(
        "",
        pattern=r"^(/.*|s3://[a-z0-9][a-z0-9.-]+(/[0-9A-Za-z._/-]*)?)?$",
        description="Folder or s3://bucket/prefix to which the finished package is copied, for a cluster's Triton server. "
        "The copy is stored under its content digest. Empty: no copy.",
    )
    quantization: QuantizationName = Field(
        "none",
        description="Format of the packaged weights. int8: linear layers and output layer with 8-bit weights, for the "
        "python backend. fp8: linear layers with 8-bit floating-point weights and inputs, for the vllm backend. "
        "int4-gptq: linear layers with 4-bit weights that GPTQ calibrates on training rows, for the vllm backend; requires "
        "the quantization environment. "
        "Packaging fails unless the loss on the test split rises by at most quantization_margin at 95% confidence.",
    )
    quantization_margin: float = Field(
        0.02,
        gt=0,
        le=MAX_QUANTIZATION_MARGIN,
        description="Maximum increase of the loss on the test split due to quantization, in nats per token, at 95% "
        "confidence.",
    )
    quantization_items: int = Field(
        200,
        ge=MIN_QUANTIZATION_ITEMS,
        le=1_000_000,
        description="Maximum number of random test rows on which the quantized and the unquantized model are compared.",
    )
    vllm: VllmConfig = Field(VllmConfig(), description="Engine settings of the vllm backend.")
    serving_root: str = Field(
        "",
        pattern=r"^(/.*)?$",
        description="Folder that contains this package on a cluster's Triton server, such as /models. The paths in "
        "a vLLM package begin with this folder. Empty: paths relative to the package's folder, for `tuneline serve`.",
    )
    model_name: str = Field(
        "tuneline",
        pattern=NAME_PATTERN,
        max_length=100,
        description="Name of the model in Triton and in the URL of requests: letters, digits, dots, dashes and "
        "underscores.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Data type of merged weights and of GPU computation. auto: bfloat16 if this machine has a GPU "
        "or quantization is int4-gptq, else float32.",
    )
    max_prompt_tokens: int = Field(
        4096,
        ge=1,
        le=10_000_000,
        description="Maximum prompt length in tokens, including the chat template; limited by the model's context.",
    )
    max_tokens: int = Field(
        1024,
        ge=1,
        le=10_000_000,
        description="Maximum value of max_tokens in a request.",
    )
    default_max_tokens: int = Field(
        256, ge=1, le=10_000_000, description="Default of max_tokens in a request; no effect with the vllm backend."
    )
    slots: int = Field(
        16,
        ge=1,
        le=1024,
        description="Maximum number of requests in one batch. More slots increase throughput and memory.",
    )
    max_queue: int = Field(
        64,
        ge=0,
        le=100_000,
        description="Maximum number of requests that wait for a slot. The gateway rejects further requests with 429; with the "
        "python backend, Triton rejects them with UNAVAILABLE.",
    )
    cache_tokens: int = Field(
        0,
        ge=0,
        le=1_000_000_000,
        description="python backend: capacity of the shared key-value cache in tokens (prompts and answers). Minimum: one "
        "request of maximum length. 0: enough for all slots at maximum length, but at most 1 GiB on a CPU, or half of the "
        "memory that the weights leave free on a GPU.",
    )
    threads: int = Field(
        0, ge=0, le=1024, description="CPU threads of the served model. 0: all cores available to the server."
    )
    prove: bool = Field(
        True,
        description="Load the package in a real Triton server and compare its answers with those of transformers. "
        "Promotion of an unproven package requires --force and --reason.",
    )
    golden_prompts: list[str] = Field(
        list(GOLDEN_PROMPTS),
        min_length=1,
        max_length=100,
        description="Prompts to which Triton and transformers must give the same greedy answers.",
    )
    golden_max_tokens: int = Field(24, ge=1, le=4096, description="Number of tokens compared for each golden prompt.")
    ready_timeout_seconds: float = Field(
        300.0,
        gt=0,
        le=86_400,
        description="Timeout for loading the package in the proof, in seconds.",
    )

    @field_validator("golden_prompts")
    @classmethod
    def _check_prompts(cls, prompts: list[str]) -> list[str]:
        for number, prompt in enumerate(prompts, 1):
            if not prompt.strip():
                raise ValueError(f"golden prompt {number} is empty; expected a non-empty string")
        return prompts


def check_quantization(config: TritonPackagingConfig, *, is_attached: bool) -> None:
    """Check that a package can have quantized weights.

    Raises:
        ConfigurationError: another backend serves the package, its adapter is attached, its weights are not stored in it,
            `vllm.quantization` is another format, or vLLM cannot compute the format in `dtype`.
    """
    entry = find_quantization(config.quantization)
    backend = entry.backend if entry else ""
    method = config.vllm.quantization
    for found, is_refused, expected in (
        (f"backend {config.backend}", config.backend != backend, f"backend {backend}"),
        (
            f"vllm.quantization {method}",
            backend == "vllm" and method not in ("", "compressed-tensors"),
            "an empty vllm.quantization",
        ),
        (
            f"dtype {config.dtype}",
            entry is not None and entry.needs_bfloat16 and config.dtype == "float32",
            "dtype auto or bfloat16",
        ),
        ("an attached adapter", is_attached, "an adapter that is merged"),
        ("weights referenced", config.weights == "referenced", "weights copied"),
    ):
        if config.quantization != "none" and is_refused:
            raise ConfigurationError(
                f"triton_packaging.quantization is {config.quantization}, with {found}; expected {expected}",
                hint="Set triton_packaging.quantization to none, or change the other setting of triton_packaging.",
            )
