"""YAML that would take much memory or time is refused with a YAMLError."""

from __future__ import annotations

import re

import pytest
import yaml

from components.common.runtime.yaml_loading import MAX_CHARACTERS, MAX_DEPTH, MAX_NODES, load_yaml

# Each line repeats the line before nine times: 9**29 values ("billion laughs").
NESTED_ALIASES = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))
MERGED_ALIASES = re.sub(r"\[(\*.*)\]", r"{<<: [\1]}", NESTED_ALIASES).replace("[x]", "{x: 1}")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (NESTED_ALIASES, f"more than {MAX_NODES:,} values"),
        (MERGED_ALIASES, f"more than {MAX_NODES:,} values"),
        ("a: &a [*a]", f"more than {MAX_DEPTH} levels"),
        (
            "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 60)),
            f"more than {MAX_DEPTH} levels",
        ),
        ("[" * 5000, f"more than {MAX_DEPTH} levels"),
        ("a" * (MAX_CHARACTERS + 1), f"at most {MAX_CHARACTERS:,}"),
        ("day: 2026-13-01", "month must be in 1..12"),
        ("number: " + "9" * 5000, "4300 digits"),
    ],
    ids=["aliases", "merged aliases", "cycle", "chain", "depth", "length", "date", "digits"],
)
def test_hostile_yaml_is_refused(text: str, problem: str) -> None:
    with pytest.raises(yaml.YAMLError, match=re.escape(problem)):
        load_yaml(text)


def test_aliases_and_merge_keys_within_the_limits_are_loaded() -> None:
    text = "base: &base {rank: 8, dropout: 0.1}\nlist: [*base, *base]\nmine: {<<: *base, rank: 16}\n"
    base = {"rank": 8, "dropout": 0.1}
    assert load_yaml(text) == {"base": base, "list": [base, base], "mine": {"rank": 16, "dropout": 0.1}}
    assert load_yaml("") is None
