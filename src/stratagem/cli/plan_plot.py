"""A plan as a picture, for a proposal: how it scales, and where a step's time goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stratagem.cli.plan_show import number, rows, size, time
from stratagem.planning import predict
from stratagem.planning.predict import Plan

SUFFIXES = (".png", ".pdf", ".svg")
# Colours that those who see no red or green tell apart (Okabe and Ito).
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_PARTS = {"computing": "#0072B2", "starting kernels": "#56B4E9", "all-reduce": "#D55E00"}
_GREY = "#666666"
_BELOW: dict[str, Any] = {
    "loc": "upper center", "bbox_to_anchor": (0.5, -0.11), "ncols": 3, "frameon": False,
    "columnspacing": 1.2, "handlelength": 1.6,
}  # fmt: skip


def draw(plan: Plan, path: Path) -> None:
    """Draws the plan into a file, whose ending says the format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(12, 6.2)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    figure.suptitle(_title(plan), fontsize=13, fontweight="bold")
    _draw_scaling(left, plan)
    _draw_parts(right, plan)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(_facts(plan), fontsize=8.5, color=_GREY)
    figure.savefig(path, dpi=150)


def new_figure(width: float, height: float) -> Any:
    """An empty picture of so many inches.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _title(plan: Plan) -> str:
    rate = f", {plan.rows_per_second:,.0f} rows/s" if plan.program.rows else ""
    devices, machine = plan.topology.devices, plan.topology.machine
    return f"{devices} x {machine.title}: {time(plan.step.seconds)} a step{rate}"


def _facts(plan: Plan) -> str:
    program = plan.program
    reduced = " + ".join(size(n) for n in program.reduces) or "none"
    return (
        f"{program.caught}; {rows(plan)}; "
        f"{number(program.total_operations)} and {size(program.memory)} of "
        f"{size(plan.topology.machine.memory)} memory a device; all-reduce of {reduced}\n"
        f"Predicted by stratagem plan for the same rows on each device: roofline, "
        f"{time(plan.topology.machine.kernel_seconds)} for each of {program.kernels} kernels, and "
        "alpha-beta formulas; the all-reduce is not hidden behind computing."
    )


def _draw_scaling(axes: Any, plan: Plan) -> None:
    order = {op: i for i, op in enumerate(sorted(plan.steps))}
    for scaling in reversed(plan.scaling):  # the best one last, on top
        best = scaling.op == plan.op
        axes.plot(
            scaling.devices,
            [100 * e for e in scaling.efficiency],
            color=_COLOURS[order[scaling.op] % len(_COLOURS)],
            linewidth=3 if best else 1.6,
            linestyle="-" if best else "--",
            label=f"{scaling.op} (best here)" if best else scaling.op,
            zorder=3 if best else 2,
        )
    planned = plan.topology.devices
    efficiency = 100 * plan.scaling[0].seconds[0] / plan.step.seconds
    axes.axvline(planned, color=_GREY, linewidth=1, linestyle=":")
    axes.plot([planned], [efficiency], "o", color="black", markersize=7, zorder=4)
    right = planned > 2048  # There is more room for the words on the other side.
    axes.annotate(
        f"{plan.topology}\n{efficiency:.0f} % at {planned:,} devices",
        (planned, efficiency),
        textcoords="offset points",
        xytext=(-10 if right else 10, 10),
        ha="right" if right else "left",
        fontsize=10,
    )
    axes.set_xscale("log", base=2)
    ticks = [1 << k for k in range(0, predict.MOST.bit_length(), 2)]
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axes.set(xlim=(1, predict.MOST), ylim=(0, 112), xlabel="devices", ylabel="efficiency, %")
    axes.set_yticks(range(0, 101, 20))
    axes.set_title("Rows a second and device, relative to one device", loc="left", fontsize=11)
    axes.grid(alpha=0.25)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], fontsize=9, **_BELOW)


def _draw_parts(axes: Any, plan: Plan) -> None:
    names = list(plan.steps)
    scale, unit = _unit(max(s.seconds for s in _shown(plan)))
    most = 1.25 * max(s.seconds for s in _shown(plan)) / scale
    for i, (op, step) in enumerate(plan.steps.items()):
        start = 0.0
        parts = (step.compute - step.kernels, step.kernels, step.reduce)
        for name, seconds in zip(_PARTS, parts, strict=True):
            width = min(seconds / scale, most - start)
            label = name if i == 0 else None
            axes.barh(i, width, left=start, height=0.6, color=_PARTS[name], label=label)
            start += width
        cut = step.seconds / scale > most
        axes.text(
            min(start, most),
            i,
            f" {time(step.seconds)}{' → ' if cut else ''}",
            va="center",
            ha="right" if cut else "left",
            color="white" if cut else "black",
            fontsize=9,
            fontweight="bold" if op == plan.op else "normal",
        )
    feed = plan.step.input / scale
    if most / 100 < feed <= most:
        axes.axvline(feed, color="black", linewidth=1.2, linestyle="--", label="input (overlaps)")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlim=(0, most), xlabel=f"{unit} a step")
    axes.set_title(f"One step on {plan.topology.devices:,} devices", loc="left", fontsize=11)
    axes.legend(fontsize=9, **_BELOW)


def _shown(plan: Plan) -> list[Any]:
    """The steps that the bars are scaled to: those that are not many times the best."""
    return [s for s in plan.steps.values() if s.seconds <= 8 * plan.step.seconds]


def _unit(seconds: float) -> tuple[float, str]:
    return next(((s, u) for s, u in ((1.0, "s"), (1e-3, "ms")) if seconds >= s), (1e-6, "us"))
