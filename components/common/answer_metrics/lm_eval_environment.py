"""The environment in which lm-eval's code runs: without network access and output, with fixed seeds and local nltk data."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

OFFLINE_VARIABLES = ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE", "HF_EVALUATE_OFFLINE", "TRANSFORMERS_OFFLINE")
LM_EVAL_SEED = 1234  # lm-eval's default for examples and numpy; its default for the random module is 0
NLTK_HINT = (
    "Install llama-index-core, which contains punkt_tab (pip install --no-deps llama-index-core), or set NLTK_DATA to "
    "a folder that contains nltk's data."
)


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Disable network access and progress bars of lm-eval's libraries, and redirect their output to standard error."""
    environment = {name: os.environ.get(name) for name in (*OFFLINE_VARIABLES, "TOKENIZERS_PARALLELISM")}
    os.environ.update(dict.fromkeys(OFFLINE_VARIABLES, "1"), TOKENIZERS_PARALLELISM="false")
    import datasets
    import huggingface_hub
    from tqdm import tqdm  # type: ignore[import-untyped]

    datasets.disable_progress_bars()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    original_init = tqdm.__init__

    def init_disabled(self: object, *args: object, **options: object) -> None:
        original_init(self, *args, **{**options, "disable": True})

    try:
        with contextlib.ExitStack() as stack:
            for module, name in (
                (datasets.config, "HF_HUB_OFFLINE"),
                (datasets.config, "HF_DATASETS_OFFLINE"),
                (huggingface_hub.constants, "HF_HUB_OFFLINE"),
            ):
                stack.enter_context(patch_attribute(module, name, True))
            # tqdm reads its environment only when it is imported.
            stack.enter_context(patch_attribute(tqdm, "__init__", init_disabled))
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
            yield
    finally:
        for name, value in environment.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


@contextlib.contextmanager
def patch_attribute(target: object, name: str, value: object) -> Iterator[None]:
    """Replace an attribute in the block."""
    original = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, original)


def find_bundled_nltk() -> list[str]:
    """Return the nltk data folders bundled with llama-index-core; empty if the package is not installed."""
    import importlib.util

    try:
        spec = importlib.util.find_spec("llama_index.core")
    except ModuleNotFoundError:
        return []
    roots = (spec.submodule_search_locations if spec else None) or []
    return [str(folder) for root in roots if (folder := Path(root) / "_static" / "nltk_cache").is_dir()]


@contextlib.contextmanager
def set_lm_eval_seeds() -> Iterator[None]:
    """Set lm-eval's seeds, and restore the generators afterwards."""
    import numpy

    state, numpy_state = random.getstate(), numpy.random.get_state()
    random.seed(0)
    numpy.random.seed(LM_EVAL_SEED)
    try:
        yield
    finally:
        random.setstate(state)
        numpy.random.set_state(numpy_state)
