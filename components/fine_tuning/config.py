"""Configuration of fine-tuning: what is tuned, on how much, and how often it is saved."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class LoraConfig(BaseModel):
    """Low-rank adaptation (Hu et al., arXiv 2106.09685)."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    rank: int = Field(16, ge=1, description="Rank r of the update. Higher learns more and costs r(d_in + d_out) parameters a matrix.")
    alpha: float = Field(32.0, gt=0, description="The update is scaled by alpha/rank: higher learns faster and less stably.")
    dropout: float = Field(0.05, ge=0, lt=1, description="Dropout on the update's input. Higher resists overfitting on few rows.")
    target_modules: list[str] | Literal["all-linear"] = Field(
        "all-linear", description='Module names that get an update; "all-linear" is every linear layer but the output head.'
    )


class FineTuningConfig(BaseModel):
    """The recipe: objective × adaptation, and the optimizer's settings."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    base_model: str = Field(
        "embedded:smollm2-135m-instruct",
        description="The model to start from: embedded:smollm2-135m-instruct, a folder in the Hugging Face layout, or hf://org/name@revision.",
    )
    objective: Literal["sft"] = Field("sft", description="What is learned. sft: the assistant's answers, in all turns.")
    adaptation: Literal["lora", "full"] = Field(
        "lora", description="What is trained. lora: a small update beside frozen weights. full: every weight (16 bytes a parameter)."
    )
    lora: LoraConfig = Field(LoraConfig(), description="Settings of adaptation lora.")
    max_steps: int | None = Field(40, ge=1, description="Stop after so many optimizer steps. null: train for `epochs` instead.")
    epochs: float = Field(1.0, gt=0, description="Passes over the training rows; counts only where max_steps is null.")
    learning_rate: float = Field(5e-4, gt=0, description="Peak learning rate. Too high diverges; full wants about a tenth of LoRA's.")
    schedule: Literal["linear", "cosine", "constant_with_warmup"] = Field(
        "linear", description="How the learning rate falls after warm-up."
    )
    warmup_steps: int = Field(4, ge=0, description="Optimizer steps over which the learning rate rises from 0 to its peak.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are scaled down to this norm when they exceed it.")
    batch_size: int = Field(8, ge=1, description="Rows an optimizer step. More is steadier and slower.")
    micro_batch_size: int = Field(4, ge=1, description="Rows in memory at once; batch_size must be a multiple. Fewer needs less memory.")
    max_length: int = Field(256, ge=8, description="Tokens a row; longer rows are cut and counted. Memory grows with it.")
    checkpoint_every: int = Field(10, ge=1, description="Optimizer steps between checkpoints: a killed run loses at most this much.")
    keep_checkpoints: int = Field(2, ge=2, description="Newest checkpoints kept. At least two: the newest may be torn by a crash.")
    validation_rows: int = Field(
        32, ge=0, description="Validation rows whose loss is measured at every checkpoint, the first ones. 0: none."
    )

    @model_validator(mode="after")
    def _batches_divide(self) -> FineTuningConfig:
        if self.batch_size % self.micro_batch_size:
            raise ValueError(f"batch_size {self.batch_size} is not a multiple of micro_batch_size {self.micro_batch_size}")
        return self
