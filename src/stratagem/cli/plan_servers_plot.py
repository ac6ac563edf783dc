"""A plan with parameter servers as a picture: rates, and how stale gradients are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stratagem.cli import plan_servers_show
from stratagem.cli.plan_plot import new_figure
from stratagem.planning.served_plan import ServedPlan

_BLUE, _RED, _GREY = "#0072B2", "#D55E00", "#666666"
_BELOW: dict[str, Any] = {
    "loc": "upper center", "bbox_to_anchor": (0.5, -0.13), "ncols": 2, "frameon": False
}  # fmt: skip


def draw(plan: ServedPlan, path: Path) -> None:
    """Draws the plan into a file, whose ending says the format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(12, 6)
    left, middle, right = figure.subplots(1, 3)
    figure.suptitle(plan_servers_show.title(plan), fontsize=12, fontweight="bold")
    _draw_rates(left, plan, "workers")
    _draw_rates(middle, plan, "servers")
    _draw_staleness(right, plan)
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    said = "; ".join(f"{k}: {v}" for k, v in plan_servers_show.facts(plan).items())
    figure.supxlabel(
        f"{said}\nPredicted by stratagem plan: bounds of a closed network, and a simulation of the "
        "coordinator's own state.",
        fontsize=8.5,
        color=_GREY,
    )
    figure.savefig(path, dpi=150)


def _draw_rates(axes: Any, plan: ServedPlan, by: str) -> None:
    points = plan.by_workers if by == "workers" else plan.by_servers
    rows = plan.step.work.rows or 1
    axes.plot(
        [getattr(point, by) for point in points],
        [rows * point.rate for point in points],
        color=_BLUE,
        marker=".",
        label="at most",
    )
    here = plan.workers if by == "workers" else plan.servers
    axes.plot([here], [rows * plan.simulated.rate], "o", color=_RED, label="simulated", zorder=3)
    mark, what = (
        (plan.costs.saturates, f"saturated: {plan.costs.bound}")
        if by == "workers"
        else (plan.worth, "more are not worth it")
    )
    axes.axvline(mark, color=_GREY, linestyle=":", label=what)
    unit = "rows/s" if plan.step.work.rows else "steps/s"
    axes.set(xlabel=by if by == "workers" else "ps", ylabel=unit)
    axes.set_xscale("log", base=2)
    ticks = [1 << k for k in range((2 * max(getattr(p, by) for p in points)).bit_length() - 1)]
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    with_others = plan.servers if by == "workers" else plan.workers
    other = "ps" if by == "workers" else "workers"
    axes.set_title(f"with {with_others} {other}", loc="left", fontsize=11)
    axes.legend(fontsize=8, **_BELOW)


def _draw_staleness(axes: Any, plan: ServedPlan) -> None:
    histogram = plan.simulated.histogram
    total = max(1, sum(histogram.values()))
    axes.bar(
        list(histogram), [100 * n / total for n in histogram.values()], color=_BLUE, label="pushes"
    )
    mean = plan.simulated.mean
    axes.axvline(mean, color=_RED, linestyle="--", label=f"mean {mean:.1f}")
    most = max(histogram, default=0)
    step = max(1, -(-most // 8))
    axes.set(xlim=(-0.6, most + 0.6), xticks=range(0, most + 1, step))
    axes.set(xlabel="other pushes between pull and push", ylabel="% of the pushes")
    axes.set_title(f"staleness: {plan_servers_show.rule(plan)}", loc="left", fontsize=11)
    axes.legend(fontsize=8, **_BELOW)
