"""Loading of YAML with limits, so that a small file cannot take the memory or the time of the machine."""

from __future__ import annotations

import yaml

MAX_CHARACTERS = 1_000_000  # PyYAML parses about 100,000 characters a second
MAX_NODES = 100_000  # with every alias replaced by its value
MAX_DEPTH = 50
TAB_PROBLEM = "'\\t'"  # in the problem of a tab as indentation
DEPTH_PROBLEM = f"values are nested more than {MAX_DEPTH} levels deep"


class LimitedLoader(yaml.SafeLoader):
    """A SafeLoader that rejects documents with too many or too deeply nested values."""

    def compose_document(self) -> yaml.Node | None:
        """Return the document's root node, whose size is checked before any value is built."""
        root: yaml.Node | None = super().compose_document()
        if root is not None:
            _check_size(root)
        return root


class StrictLoader(LimitedLoader):
    """A loader that rejects duplicate keys; PyYAML's keeps the last value."""


def _construct_mapping(loader: StrictLoader, node: yaml.MappingNode) -> dict[object, object]:
    keys: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value in keys:
            raise yaml.MarkedYAMLError(problem=f"duplicate key {key.value}", problem_mark=key.start_mark)
        keys.add(str(key.value))
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)


def load_yaml(text: str, loader: type[LimitedLoader] = LimitedLoader) -> object:
    """Return the value of a YAML document.

    Raises:
        yaml.YAMLError: the text is not YAML, contains an impossible value such as 2026-13-01, or exceeds a limit.
    """
    if len(text) > MAX_CHARACTERS:
        raise yaml.YAMLError(f"the text has {len(text):,} characters; at most {MAX_CHARACTERS:,} are allowed")
    try:
        return yaml.load(text, loader)  # noqa: S506 - a SafeLoader
    except RecursionError:
        raise yaml.YAMLError(DEPTH_PROBLEM) from None
    except ValueError as error:  # of a number or date that PyYAML recognizes by its form
        raise yaml.YAMLError(str(error)) from None


def describe_yaml_error(error: Exception) -> str:
    """Return line, column and problem in one line; of an error other than YAMLError, its text."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {'unexpected tab' if TAB_PROBLEM in problem else problem}"


def _check_size(root: yaml.Node) -> None:
    """Raise YAMLError if the document exceeds a limit. An alias counts as often as it occurs, with all its values.

    Each node is measured once, so the check takes linear time for aliases of aliases ("billion laughs").
    """
    measured: dict[int, tuple[int, int]] = {}  # nodes and levels below and including a node

    def measure(node: yaml.Node) -> tuple[int, int]:
        if id(node) in measured:
            return measured[id(node)]
        measured[id(node)] = 1, MAX_DEPTH  # for an alias within its own value
        children = node.value if isinstance(node, yaml.SequenceNode) else []
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
        sizes = [measure(child) for child in children]
        nodes, depth = 1 + sum(size for size, _ in sizes), 1 + max((levels for _, levels in sizes), default=0)
        if depth > MAX_DEPTH or nodes > MAX_NODES:
            problem = (
                DEPTH_PROBLEM if depth > MAX_DEPTH else f"more than {MAX_NODES:,} values, including those of aliases"
            )
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        measured[id(node)] = nodes, depth
        return nodes, depth

    measure(root)
