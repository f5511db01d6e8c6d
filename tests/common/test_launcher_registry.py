"""The registry of launchers and the settings model agree."""

from __future__ import annotations

from typing import get_args

import pytest

from components.common.launch import LocalLauncher
from components.common.launch.kubernetes.pod_settings import PodSettings
from components.common.launch.launcher_registry import LAUNCHERS, LauncherKind
from components.common.launch.launcher_settings import LauncherSettings


def test_registry_has_one_entry_per_kind() -> None:
    assert tuple(LAUNCHERS) == get_args(LauncherKind)


@pytest.mark.parametrize("kind", get_args(LauncherKind))
def test_registry_entry_matches_settings_section(kind: LauncherKind) -> None:
    entry, model = LAUNCHERS[kind], LAUNCHERS[kind].settings_model
    if entry.uses_this_machine:
        assert isinstance(entry.create(LauncherSettings(kind=kind)), LocalLauncher)
    if model is None:
        assert kind not in LauncherSettings.model_fields
        return
    assert LauncherSettings.model_fields[kind].annotation is model
    assert {*entry.hardware_fields, *entry.required_fields} <= model.model_fields.keys()
    assert issubclass(model, PodSettings) == (entry.resource is not None)
