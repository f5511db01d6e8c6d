"""Items of the EU AI Act's annexes on technical documentation, in tuneline's words: numbers are those of the annexes.

The list follows Regulation (EU) 2024/1689 as published on 12 July 2024. Later amendments need an edit of this list.
"""

from __future__ import annotations

from dataclasses import dataclass

PROVIDER, PRODUCT, RISK, SECURITY, LEGAL, DATA, OPERATIONS = (
    "the provider",
    "the product owner",
    "the risk manager",
    "the security team",
    "the legal department",
    "the data owner",
    "the operations team",
)


@dataclass(frozen=True)
class Item:
    """An item of an annex.

    Attributes:
        number: number in the annex.
        title: requested content, in tuneline's words.
        facts: names of the groups of facts that answer it, in `dossier.FACT_GROUPS`.
        open: requested facts that no artifact records; "" if the fact groups answer the whole item.
        supplier: who usually supplies `open`.
    """

    number: str
    title: str
    facts: tuple[str, ...] = ()
    open: str = ""
    supplier: str = PROVIDER


ANNEX_IV = (
    Item(
        "1(a)",
        "Purpose, provider, version and its predecessors",
        ("identity",),
        "intended purpose and name of the provider",
        PRODUCT,
    ),
    Item(
        "1(b)",
        "Interaction with other hardware, software and AI systems",
        ("package",),
        "systems that call the model",
        PRODUCT,
    ),
    Item(
        "1(c)",
        "Versions of software and firmware, and update requirements",
        ("software",),
        "update requirements",
        OPERATIONS,
    ),
    Item("1(d)", "Forms of delivery", ("package",), "other forms of delivery", PRODUCT),
    Item("1(e)", "Hardware on which the system runs", (), "intended hardware", OPERATIONS),
    Item(
        "1(f)",
        "Photographs and layout of products that contain the system",
        (),
        "whether the system is part of a product, and pictures of the product",
        PRODUCT,
    ),
    Item("1(g)", "User interface of the deployer", (), "user interface of the application", PRODUCT),
    Item("1(h)", "Instructions for use", (), "instructions for use", PRODUCT),
    Item("2(a)", "Development method, pre-trained models and third-party tools", ("base", "training", "software")),
    Item(
        "2(b)",
        "Design: logic, choices and their reasons, objective, expected output, trade-offs",
        ("training", "objective"),
        "reasons, assumptions, intended users and trade-offs",
    ),
    Item(
        "2(c)",
        "Architecture and computing resources",
        ("architecture", "compute"),
        "components of the application around the model",
        PRODUCT,
    ),
    Item(
        "2(d)",
        "Data: provenance, scope, selection, labelling, cleaning",
        ("data", "curation"),
        "how the sources were collected and labelled",
        DATA,
    ),
    Item("2(e)", "Human oversight, assessed in advance", (), "oversight measures and aids to interpret outputs", RISK),
    Item("2(f)", "Changes determined in advance", (), "planned changes and their limits"),
    Item(
        "2(g)",
        "Validation and tests: data, metrics, logs, reports",
        ("evaluation", "slices"),
        "signature of the responsible person, robustness and discrimination tests beyond these",
    ),
    Item("2(h)", "Cybersecurity measures", (), "measures of the deployed system", SECURITY),
    Item(
        "3",
        "Capabilities and limits, accuracy by group, risks, oversight, input data",
        ("limits", "evaluation", "slices"),
        "risks, unintended outcomes and groups of persons",
        RISK,
    ),
    Item("4", "Suitability of the metrics", ("metrics",), "reasons why these metrics suit the purpose"),
    Item("5", "Risk management system", (), "risk management file", RISK),
    Item(
        "6",
        "Changes during the lifecycle",
        ("identity",),
        "changes to the system around the model; `tuneline registry history` lists the promotions",
    ),
    Item("7", "Harmonised standards applied", (), "standards, or the solutions used instead", LEGAL),
    Item("8", "EU declaration of conformity", (), "copy of the declaration", LEGAL),
    Item("9", "Monitoring after the deployment", (), "monitoring plan", OPERATIONS),
)
ANNEX_XI = (
    Item("1.1(a)", "Tasks, and AI systems that may contain the model", (), "tasks and systems", PRODUCT),
    Item("1.1(b)", "Acceptable use policies", (), "policy", LEGAL),
    Item("1.1(c)", "Release date and distribution", ("identity", "package"), "date and method of the release", PRODUCT),
    Item("1.1(d)", "Architecture and number of parameters", ("architecture",)),
    Item("1.1(e)", "Modality, and formats of inputs and outputs", ("formats",)),
    Item("1.1(f)", "Licence", ("licences",), "licence under which the model is distributed", LEGAL),
    Item(
        "1.2(a)",
        "Technical means for the integration",
        ("package", "software"),
        "instructions for the integration",
        PRODUCT,
    ),
    Item(
        "1.2(b)",
        "Design of model and training, choices and reasons, objective",
        ("training", "objective"),
        "reasons and assumptions",
    ),
    Item(
        "1.2(c)",
        "Data: type, provenance, curation, size, selection, checks for unsuitable sources and biases",
        ("data", "curation"),
        "collection of the sources and checks for biases",
        DATA,
    ),
    Item("1.2(d)", "Computing resources, training time", ("compute",)),
    Item("1.2(e)", "Energy consumption", (), "energy used for training, measured or estimated", OPERATIONS),
    Item(
        "2.1",
        "Systemic risk: evaluation strategies and results",
        ("evaluation", "metrics"),
        "evaluations of systemic risks",
        RISK,
    ),
    Item("2.2", "Systemic risk: adversarial tests, alignment", ("training",), "adversarial tests", SECURITY),
    Item(
        "2.3",
        "Systemic risk: architecture of the system",
        ("package",),
        "architecture of the system around the model",
        PRODUCT,
    ),
)
ANNEXES = {"IV": ANNEX_IV, "XI": ANNEX_XI}
