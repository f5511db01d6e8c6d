"""The plot of the GPU benchmark: rates of the trainings, and the time of a step."""

from __future__ import annotations

from pathlib import Path

KINDS = {"matrix products": "#4c78a8", "attention": "#f58518", "copies and casts": "#b279a2", "optimizer": "#54a24b",
         "other": "#9d755d", "idle": "#d9d9d9"}  # fmt: skip


def draw(rates: dict[str, float], profiles: dict[str, dict[str, float]], path: Path) -> None:
    """Draw horizontal bars: tokens per second by case, and the share of a profiled step by kind of kernel.

    Args:
        rates: Tokens per second by case.
        profiles: By case, the seconds of each kind of kernel, and of the whole "step".
        path: The SVG file.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "tuneline"
    from matplotlib import pyplot

    names = sorted(rates, key=rates.__getitem__)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.4), layout="constrained")
    colors = ["#9d9d9d" if name.startswith("trl") else "#4c78a8" for name in names]
    left.barh(names, [rates[name] for name in names], color=colors)
    left.bar_label(left.containers[0], fmt="{:,.0f}", padding=3, fontsize=8)
    left.set_xlim(0, 1.15 * max(rates.values()))
    left.set_xlabel("tokens per second (gray: plain TRL)")
    for row, profile in enumerate(profiles.values()):
        kernels = sum(seconds for kind, seconds in profile.items() if kind != "step")
        shares = {**profile, "idle": max(0.0, profile["step"] - kernels)}
        start = 0.0
        for kind, color in KINDS.items():
            width = shares.get(kind, 0.0) / profile["step"]
            right.barh(row, width, left=start, color=color, label=kind if row == 0 else None)
            start += width
    right.set_yticks(range(len(profiles)), list(profiles))
    right.set_xlim(0, 1)
    right.set_xlabel("share of a step")
    right.legend(loc="upper center", bbox_to_anchor=(0.5, 1.28), ncols=3, fontsize=8, frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
