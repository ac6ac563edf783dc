"""Tables and the plot of the figures that run.py collected."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path

from contenders import Case, Goal
from rich.console import Console
from rich.table import Table


@dataclasses.dataclass
class Figures:
    """One contender's results.

    Attributes:
        firsts: seconds of the first step, one a process.
        samples: in the case's unit, in the order in which they were taken.
        loss: last loss of the last process.
        about: versions.
    """

    firsts: list[float] = dataclasses.field(default_factory=list)
    samples: list[float] = dataclasses.field(default_factory=list)
    loss: float = 0.0
    about: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A goal and what was measured.

    Attributes:
        goal: the goal.
        than: the contender it was measured against.
        median: median of the ratios of two samples taken in one turn.
        quartiles: of those.
        met: whether the median keeps the bound.
    """

    goal: Goal
    than: str
    median: float
    quartiles: tuple[float, float]
    met: bool


def ratios(case: Case, figures: dict[str, Figures]) -> list[Ratio]:
    """Measures the case's goals for which contenders ran."""
    found = []
    for goal in case.goals:
        rivals = [name for name in goal.than if name in figures]
        if goal.who not in figures or not rivals:
            continue
        best = min if case.lower_is_better else max
        than = best(rivals, key=lambda name: statistics.median(figures[name].samples))
        turns = [
            ours / theirs
            for ours, theirs in zip(figures[goal.who].samples, figures[than].samples, strict=True)
        ]
        low, median, high = statistics.quantiles(turns, n=4, method="inclusive")
        met = median <= goal.bound if case.lower_is_better else median >= goal.bound
        found.append(Ratio(goal, than, median, (low, high), met))
    return found


def show(console: Console, case: Case, figures: dict[str, Figures]) -> None:
    """Prints a case's figures, then its goals."""
    table = Table(title=case.title, title_justify="left")
    table.add_column("contender", no_wrap=True)
    for heading in (case.unit, "quartiles", "first step", "last loss"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, f in figures.items():
        low, median, high = statistics.quantiles(f.samples, n=4, method="inclusive")
        table.add_row(
            name,
            f"{median:,.0f}",
            f"{low:,.0f}-{high:,.0f}",
            f"{statistics.median(f.firsts):.2f} s",
            f"{f.loss:.4f}",
        )
    console.print(table)
    for ratio in ratios(case, figures):
        bound = f"{'<=' if case.lower_is_better else '>='} {ratio.goal.bound:g}"
        low, high = ratio.quartiles
        verdict = "[green]met[/]" if ratio.met else "[red]missed[/]"
        if low < ratio.goal.bound < high:
            verdict += ", the bound lies within the quartiles"
        console.print(
            f"  {ratio.goal.who} / {ratio.than}: {ratio.median:.3f} ({low:.2f} to {high:.2f}), "
            f"goal {bound}: {verdict}",
            soft_wrap=True,
        )
    console.print()


def plot(results: Sequence[tuple[Case, dict[str, Figures]]], path: Path) -> None:
    """Draws one panel a case: a bar is the median, a dot one sample."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(results), figsize=(5 * len(results), 3.2), squeeze=False, layout="constrained"
    )
    for axis, (case, figures) in zip(axes[0], results, strict=True):
        names = list(figures)[::-1]
        medians = [statistics.median(figures[name].samples) for name in names]
        colors = ["tab:blue" if name.startswith("stratagem") else "silver" for name in names]
        axis.barh(names, medians, color=colors)
        for i, name in enumerate(names):
            dots = figures[name].samples
            axis.plot(dots, [i] * len(dots), "k.", markersize=3)
        better = "lower" if case.lower_is_better else "higher"
        axis.set_title(case.title, fontsize="small")
        axis.set_xlabel(f"{case.unit} ({better} is better)")
    figure.savefig(path, dpi=130)
