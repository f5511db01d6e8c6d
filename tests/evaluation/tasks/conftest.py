"""A tiny model, asked plainly, for the tests of tasks."""

from __future__ import annotations

import pytest

from tests.evaluation.tasks.plain_engine import PlainEngine, plain_engine


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> PlainEngine:
    """A random model of two layers."""
    return plain_engine(tmp_path_factory.mktemp("plain") / "tiny")
