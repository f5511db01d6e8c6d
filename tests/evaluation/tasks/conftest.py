"""The tiny model without batching, for the tests of tasks."""

from __future__ import annotations

import pytest

from tests.evaluation.tasks.fake_engines import PlainEngine, plain_engine


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> PlainEngine:
    """Return an engine with a random model of two layers."""
    return plain_engine(tmp_path_factory.mktemp("plain") / "tiny")
