"""Settings that a recipe leaves open: chosen from rows, model and memory, and equal for equal inputs. Fast tier: arithmetic."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from components.common.models.model_shape import ModelShape
from components.common.runtime.errors import ConfigurationError
from components.fine_tuning import acceleration, training_plan
from components.fine_tuning.acceleration import TrainingDevice
from components.fine_tuning.config import FineTuningConfig, Recipe
from components.fine_tuning.recipe_defaults import (
    CompletedRecipe,
    check_memory,
    complete_recipe,
    has_open_settings,
    measure_lengths,
    share_settings,
)
from tests.fine_tuning.builders import build_conversation
from tests.fine_tuning.recipes import complete_recipe as recipe
from tests.tiny import tiny_tokenizer

GB = 10**9
LLAMA_8B = ModelShape(
    parameters=8_072_000_000,
    trainable=42_000_000,
    embedding=525_000_000,
    layers=32,
    hidden=4096,
    intermediate=14_336,
    vocabulary=128_256,
)
SHARDED = {"micro_batch_size": 8, "batch_size": 64, "strategy": "fsdp2", "processes": 8}


def choose(
    lengths: list[int], memory: int | None = 10**15, context: int | None = 131_072, gpu: bool = True, **settings: Any
) -> CompletedRecipe:
    text = SimpleNamespace(max_position_embeddings=context)
    model_config = SimpleNamespace(get_text_config=lambda decoder: text)
    config = FineTuningConfig.model_validate(settings)
    return complete_recipe(config, lengths, model_config, LLAMA_8B, TrainingDevice(is_gpu=gpu, memory=memory))


def test_default_recipe_covers_the_rows_and_states_each_choice() -> None:
    completed = choose([*range(1, 96), 400, 500, 600, 700, 8000])
    chosen = completed.recipe
    assert (chosen.max_length, chosen.epochs, chosen.batch_size, chosen.micro_batch_size) == (128, 3.0, 16, 8)
    assert chosen.learning_rate == pytest.approx(2.9e-4)  # LoRA of an 8B Llama: 2.9e-4 in the source's table
    assert [reason.split(":")[0] for reason in completed.reasons] == [
        "max_length 128",
        "micro_batch_size 8",
        "batch_size 16",
        "epochs 3",
        "learning_rate 0.00029",
    ]
    assert "95% of the rows have at most 95 tokens" in completed.reasons[0]
    assert not has_open_settings(chosen)


def test_presets_set_the_size_that_a_recipe_leaves_open() -> None:
    rows = [*range(1, 96), 1000, 1000, 2000, 3000, 8000]
    quick, balanced, thorough = (choose(rows, preset=name) for name in ("quick", "balanced", "thorough"))
    assert [c.recipe.max_length for c in (quick, balanced, thorough)] == [128, 128, 3008]
    assert [c.recipe.epochs for c in (quick, balanced, thorough)] == [1, 3, 6]
    assert [c.recipe.early_stopping for c in (quick, balanced, thorough)] == [None, None, 3]
    assert balanced == choose(rows)
    assert quick.reasons[0] == (
        "preset quick: at most 1 epoch, and a max_length of at most 512 tokens, for settings that the recipe omits"
    )
    assert "epochs 6: preset thorough" in thorough.reasons
    assert "early_stopping 3: preset thorough" in thorough.reasons
    long = choose([9000] * 10, preset="quick")
    assert long.recipe.max_length == 512
    assert "preset quick allows at most 512" in long.reasons[1]
    assert choose(rows, preset="quick", objective="dpo").recipe.epochs == 1
    assert choose(rows, preset="thorough", validation_rows=0).recipe.early_stopping is None


@pytest.mark.parametrize(
    ("settings", "longest", "memory", "hint"),
    [
        ({"micro_batch_size": 8}, 4096, 80 * GB, ""),
        ({"micro_batch_size": 8}, 65_536, None, ""),
        ({"micro_batch_size": 8}, 32_768, 80 * GB, "Set fine_tuning.micro_batch_size to 1."),
        ({"micro_batch_size": 1}, 262_144, 80 * GB, "Set fine_tuning.micro_batch_size to 1 and fine_tuning.max_length"),
        ({"micro_batch_size": 1, "activation_checkpointing": "off"}, 65_536, 80 * GB, "Set fine_tuning.activation_ch"),
        (SHARDED, 131_072, 80 * GB, "Set fine_tuning.micro_batch_size to 1"),
        (
            {"micro_batch_size": 1, "adaptation": "full"},
            512,
            40 * GB,
            "Use a smaller model, an adaptation that needs less memory",
        ),
    ],
)
def test_rows_that_cannot_fit_into_memory_are_refused_with_the_arithmetic(
    settings: dict[str, Any], longest: int, memory: int | None, hint: str
) -> None:
    chosen, shape = recipe(**settings), LLAMA_8B
    if chosen.adaptation == "full":
        shape = replace(shape, trainable=shape.parameters)
    device = TrainingDevice(is_gpu=True, memory=memory)
    if not hint:
        check_memory(chosen, longest, shape, device)
        return
    with pytest.raises(ConfigurationError, match=rf"{longest:,} tokens is [\d.]+ GB \(weights ") as error:
        check_memory(chosen, longest, shape, device)
    assert error.value.hint.startswith(hint)
    if found := re.search(r"max_length to (\d+)", error.value.hint):
        check_memory(chosen, int(found[1]), shape, device)


def test_shards_reduce_the_memory_of_weights_but_not_of_activations() -> None:
    parts, sharded = (
        acceleration.estimate_memory_parts(recipe(**settings), LLAMA_8B, rows=8, length=1024, gpu=True)
        for settings in ({"micro_batch_size": 8, "batch_size": 64}, SHARDED)
    )
    ratios = {name: parts[name] / sharded[name] for name in parts if name not in ("weights", "total")}
    state = dict.fromkeys(("gradients", "optimizer"), 8.0)
    head = LLAMA_8B.vocabulary * LLAMA_8B.hidden * 2  # bfloat16; gathered beside a layer, which is smaller
    assert head < sharded["weights"] - parts["weights"] / 8 < 2 * head
    assert ratios == pytest.approx(state | dict.fromkeys(("activations", "logits", "process"), 1.0))
    assert sharded["total"] == sum(size for name, size in sharded.items() if name != "total")


def test_memory_of_a_pair_counts_each_answer_once() -> None:
    """The length of a pair's example is that of both sequences."""
    device = TrainingDevice(is_gpu=True, memory=80 * GB)
    settings: dict[str, Any] = {"micro_batch_size": 1, "attention": "sdpa"}
    limit = next(n for n in range(64, 10**6, 64) if not fits(recipe(**settings), n, device))
    pairs = next(n for n in range(64, 10**6, 64) if not fits(recipe(**settings, objective="orpo"), n, device))
    assert pairs == pytest.approx(limit, rel=0.01)


def fits(chosen: Recipe, longest: int, device: TrainingDevice) -> bool:
    try:
        check_memory(chosen, longest, LLAMA_8B, device)
    except ConfigurationError:
        return False
    return True


def test_settings_of_the_recipe_precede_the_preset() -> None:
    settings = {"max_length": 4096, "epochs": 2.0, "early_stopping": 7}
    chosen = choose([100], preset="thorough", **settings).recipe
    assert {name: getattr(chosen, name) for name in settings} == settings
    complete = recipe(preset="thorough")
    assert has_open_settings(complete), "early stopping is open"
    assert not has_open_settings(recipe(preset="thorough", early_stopping=2))
    assert "preset" not in FineTuningConfig().model_dump()


@pytest.mark.parametrize(
    ("settings", "rate", "epochs"),
    [
        ({"adaptation": "full"}, 2.9e-5, 3),
        ({"adaptation": "p_tuning"}, 2.9e-3, 3),
        ({"objective": "dpo"}, 7.1e-6, 1),
        ({"objective": "kto", "adaptation": "full"}, 7.1e-7, 1),
        ({"objective": "orpo", "adaptation": "full"}, 7.1e-6, 1),
        ({"objective": "simpo"}, 7.1e-6, 1),
        ({"objective": "text"}, 2.9e-4, 1),
    ],
)
def test_rate_and_epochs_follow_adaptation_and_objective(settings: dict[str, Any], rate: float, epochs: float) -> None:
    chosen = choose([100], **settings).recipe
    assert (chosen.learning_rate, chosen.epochs) == (pytest.approx(rate, rel=0.02), epochs)


def test_length_stays_within_context_and_memory() -> None:
    assert choose([9000] * 10, context=4096).recipe.max_length == 4096
    assert choose([9000] * 10, context=4096, adaptation="p_tuning").recipe.max_length == 4096 - 20
    assert choose([9000] * 10, context=None).recipe.max_length == 9024
    limited = choose([90_000] * 10, memory=40 * GB)
    assert 64 <= limited.recipe.max_length < 90_000
    assert "40 GB of memory allow" in limited.reasons[0]
    assert limited.recipe.micro_batch_size == 1
    assert choose([90_000] * 10, objective="text").recipe.max_length == 2048, "longer texts are split"


def test_micro_batch_fits_memory_batch_and_objective() -> None:
    assert choose([500], memory=30 * GB).recipe.micro_batch_size < 8
    assert choose([500], batch_size=6).recipe.micro_batch_size == 2
    assert choose([500], processes=3).recipe.batch_size == 24
    assert choose([500], objective="kto", memory=1).recipe.micro_batch_size == 2
    assert choose([500], gpu=False).recipe.micro_batch_size == 2, "more rows are slower on a CPU"
    unknown = choose([500], memory=None)
    assert unknown.recipe.micro_batch_size == 2
    assert "the memory of the machine that trains is not known" in unknown.reasons[1]


def test_stated_settings_are_kept() -> None:
    stated = {"max_length": 77, "micro_batch_size": 3, "batch_size": 9, "epochs": 0.5, "learning_rate": 0.1}
    completed = choose([9000], memory=1, **stated)
    assert completed.reasons == []
    assert {name: getattr(completed.recipe, name) for name in stated} == stated


@pytest.mark.parametrize(
    ("settings", "steps", "seen"),
    [
        ({"max_steps": 40, "batch_size": 8}, 40, 320),
        ({"epochs": 3, "batch_size": 16}, 357, 5700),
        ({"epochs": 0.5, "batch_size": 16}, 60, 960),
    ],
)
def test_rows_seen_count_whole_and_partial_epochs(settings: dict[str, Any], steps: int, seen: int) -> None:
    config = recipe(**settings, warmup_steps=None, checkpoint_every=None)
    plan = training_plan.plan_steps(1900, config)
    assert plan.total == steps
    assert (plan.warmup, plan.checkpoint_interval) == (-(-steps * 3 // 100), max(10, -(-steps // 20)))
    assert training_plan.count_rows_seen(1900, 1900, steps, config) == seen
    warning = training_plan.describe_unseen_rows(1900, seen, config)
    assert (warning is None) == (seen >= 1900)
    if "max_steps" in settings:
        assert warning == (
            "with fine_tuning.max_steps 40, training covers 320 of 1,900 rows (0.17 epochs). "
            "Set fine_tuning.max_steps to null and epochs to at least 1 to train on all rows"
        )


def test_row_of_several_examples_has_the_length_of_the_longest() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
    rows = [build_conversation(str(i), *("What is it?", "None.") * i) for i in range(1, 4)]
    whole = [len(tokenizer.apply_chat_template(row["messages"], tokenize=True)["input_ids"]) for row in rows]
    rows.append(build_conversation("unanswered", "What is it?"))
    assert measure_lengths(rows, FineTuningConfig(), tokenizer) == whole


def test_one_step_has_no_warmup() -> None:
    """The rate of the first warm-up step is 0: it would change nothing."""
    assert training_plan.plan_steps(16, recipe(epochs=1, batch_size=16, warmup_steps=None)).warmup == 0


@pytest.mark.parametrize("objective", ["sft", "kto"])
@pytest.mark.parametrize("processes", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [None, *range(1, 17)])
def test_every_accepted_batch_size_gives_a_recipe(objective: str, processes: int, batch_size: int | None) -> None:
    settings = {"objective": objective, "processes": processes, "batch_size": batch_size}
    smallest = processes * (2 if objective == "kto" else 1)
    if batch_size and batch_size % smallest:
        with pytest.raises(ValidationError, match=f"batch_size {batch_size} is not a multiple of micro_batch_size"):
            FineTuningConfig.model_validate(settings)
    else:
        assert choose([500], **settings).recipe.gradient_accumulation_steps >= 1


@pytest.mark.parametrize(("objective", "micro_batch_size"), [("kto", 2), ("orpo", 1)])
def test_recipes_of_a_sweep_share_the_micro_batch(objective: str, micro_batch_size: int) -> None:
    """These losses depend on it, so other values would not be comparable."""
    config = FineTuningConfig.model_validate({"objective": objective, "sweep": {"vary": {"batch_size": [8, 12]}}})
    recipes = share_settings(config, 128).recipes.values()
    assert {(recipe.max_length, recipe.micro_batch_size) for recipe in recipes} == {(128, micro_batch_size)}


def test_virtual_tokens_that_fill_the_context_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="virtual_tokens leaves -52 tokens of the model's context"):
        choose([500], context=2048, adaptation="p_tuning", prompt={"virtual_tokens": 2100})
