"""How a plan with parameter servers is shown: as tables, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stratagem.cli import terminal
from stratagem.cli.plan_show import number, size, time
from stratagem.planning.served import Load
from stratagem.planning.served_plan import Point, ServedPlan

_MOST = 8  # rows of a table that are shown one by one
_P95 = 0.95
_WHOLE = 100


def to_json(plan: ServedPlan) -> str:
    """One object: `machine`, `workers`, `servers`, `rule`, `step`, `simulated` and more."""
    costs, simulated = plan.costs, plan.simulated
    shown = {
        "machine": asdict(plan.machine),
        "workers": plan.workers,
        "servers": plan.servers,
        "rule": dict(plan.rule),
        "step": asdict(plan.step),
        "pulled": plan.step.pulled,
        "pushed": plan.step.pushed,
        "requests": costs.requests,
        "alone": {
            "seconds": costs.seconds,
            "pull": costs.pull,
            "compute": costs.compute,
            "push": costs.push,
        },
        "busy": costs.busy,
        "bound": costs.bound,
        "saturates": costs.saturates,
        "seconds": plan.seconds,
        "steps_per_second": simulated.rate,
        "rows_per_second": plan.rows_per_second,
        "staleness": {
            "mean": simulated.mean,
            "p95": simulated.quantile(_P95),
            "max": max(simulated.histogram, default=0),
            "histogram": simulated.histogram,
        },
        "simulated": asdict(simulated),
        "memory": {
            "bytes": [load.held for load in plan.loads],
            "of": plan.machine.memory,
            "balance": plan.balance,
        },
        "snapshot": plan.snapshot,
        "by_workers": [asdict(point) for point in plan.by_workers],
        "by_servers": [asdict(point) for point in plan.by_servers],
        "worth": plan.worth,
        "notes": plan.notes,
    }
    return json.dumps(shown, indent=2)


def show(plan: ServedPlan, console: Console | None = None) -> None:
    """Prints the step, the servers, how the cluster scales, and what to bear in mind."""
    console = console or terminal.console()
    console.print(Text(title(plan), "bold"))
    console.print(_step(plan))
    if plan.step.tables:
        console.print(_tables(plan))
    console.print(_servers(plan))
    console.print(_points("other numbers of workers, at most", plan, plan.by_workers))
    console.print(_points("other numbers of servers, at most", plan, plan.by_servers))
    for line in _advice(plan):
        console.print(Text(f"- {line}"))
    for note in plan.notes:
        console.print(Text(f"! {note}", "yellow"))
    console.print(Text(f"Constants of {plan.machine.name}: {plan.machine.source}", "dim"))


def title(plan: ServedPlan) -> str:
    """One line: the cluster, and the figures that everybody asks for."""
    rows = f", {plan.rows_per_second:,.0f} rows/s" if plan.step.work.rows else ""
    return (
        f"{plan.workers} workers, {plan.servers} ps, each {plan.machine.title}: "
        f"{rate(plan.simulated.rate)} steps/s{rows}"
    )


def rate(steps: float) -> str:
    """Steps a second: whole ones from 100 on, else with three figures."""
    return f"{steps:,.0f}" if steps >= _WHOLE else f"{steps:.3g}"


def rule(plan: ServedPlan) -> str:
    """The rule of consistency, in words."""
    said = plan.rule
    if said["max_staleness"] is not None:
        return f"asynchronous, max_staleness={said['max_staleness']}"
    if said["backup_workers"]:
        return f"synchronous, {said['backup_workers']} backup workers"
    return str(said["mode"])


def _step(plan: ServedPlan) -> Table:
    step, work, costs, simulated = plan.step, plan.step.work, plan.costs, plan.simulated
    table = Table(box=box.SIMPLE, show_header=False)
    given = ", ".join(work.strategy)
    rows = f"{work.rows:,} rows of each worker" if work.rows else "its rows are not known"
    table.add_row("step", f"{work.caught} (strategy in the script: {given}); {rows}")
    whole = sum(nbytes for _, nbytes in step.whole)
    by_row = step.pulled - whole
    each = f"{size(whole)} whole ({len(step.whole)} variables), {size(by_row)} by row"
    table.add_row("pull", f"{size(step.pulled)}: {each}")
    table.add_row("push", f"{size(step.pushed)}; {costs.requests} requests to servers a step")
    kinds = f"{number(work.total_operations)}, {size(work.bytes)} of memory traffic"
    table.add_row("computing", f"{kinds}, in about {work.kernels} kernels")
    alone = f"pull {time(costs.pull)} + computing {time(costs.compute)} + push {time(costs.push)}"
    table.add_row("alone", f"{time(costs.seconds)}: {alone}")
    parts = (
        f"pull {time(simulated.pull)} + computing {time(simulated.compute)} + push "
        f"{time(simulated.push)} + waiting for work {time(simulated.waiting)}"
    )
    table.add_row(f"of {plan.workers} workers", f"{time(plan.seconds)}: {parts}")
    late = f"; {simulated.dropped:.0%} of the gradients come too late" if simulated.dropped else ""
    stale = (
        f"mean {simulated.mean:.1f}, p95 {simulated.quantile(_P95)}, most "
        f"{max(simulated.histogram, default=0)}{late}"
    )
    table.add_row("staleness", f"{stale} ({rule(plan)}; {simulated.closures} simulated steps)")
    table.add_row("snapshot", f"{time(plan.snapshot)}, all servers at the same time")
    return table


def _tables(plan: ServedPlan) -> Table:
    table = Table(
        "pulled by row", "rows", "bytes a row", "named in a step", "distinct", "from", "as sums",
        box=box.SIMPLE,
    )  # fmt: skip
    for each in plan.step.tables:
        rows = f"{each.rows:,}" if each.rows else "grows"
        cells = (each.name, rows, f"{each.row_bytes:,}", f"{each.mentions:,}")
        sums = f"{each.bags:,}" if each.bags else "no"
        table.add_row(*cells, f"{each.distinct:,}", each.known, sums)
    return table


def _servers(plan: ServedPlan) -> Table:
    partitioner = plan.step.partitioner or "no partitioner"
    heading = f"the servers, with slots; {partitioner}; fullest {plan.balance:.2f} of the mean"
    table = Table(
        "ps", "holds", "of its memory", "variables", "pulled a step", "pushed a step", "rows",
        box=box.SIMPLE, title=heading, title_justify="left",
    )  # fmt: skip
    loads = list(plan.loads)
    if len(loads) > _MOST:  # the fullest ones
        loads = sorted(loads, key=lambda load: -load.held)[:_MOST]
    for load in loads:
        table.add_row(*_server(plan, load))
    if len(plan.loads) > _MOST:
        table.add_row("...", f"{len(plan.loads) - _MOST} more", "", "", "", "", "")
    return table


def _server(plan: ServedPlan, load: Load) -> Sequence[str]:
    count = len({each.name for each in plan.step.loads if each.server == load.server})
    return (
        str(load.server),
        size(load.held),
        f"{load.held / plan.machine.memory:.1%}",
        str(count),
        size(load.pulled),
        size(load.pushed),
        f"{load.rows:,.0f}",
    )


def _points(heading: str, plan: ServedPlan, points: Sequence[Point]) -> Table:
    table = Table(
        "workers", "ps", "steps/s", "rows/s", "saturated",
        box=box.SIMPLE, title=heading, title_justify="left",
    )  # fmt: skip
    for point in points:
        here = (point.workers, point.servers) == (plan.workers, plan.servers)
        rows = f"{plan.step.work.rows * point.rate:,.0f}" if plan.step.work.rows else ""
        cells = (f"{point.workers:,}", f"{point.servers:,}", rate(point.rate), rows)
        bound = "" if point.bound == "workers" else point.bound
        table.add_row(*cells, bound, style="bold" if here else "")
    return table


def _advice(plan: ServedPlan) -> list[str]:
    costs = plan.costs
    found = [
        f"{plan.servers} ps serve {costs.saturates:.1f} workers; with more, this is saturated: "
        f"{costs.bound}.",
        f"For {plan.workers} workers {plan.worth} ps are worth it: "
        f"{plan.worth / plan.workers:.2g} for each worker.",
    ]
    busiest, part = max(plan.simulated.busy.items(), key=lambda item: item[1])
    return [*found, f"Busiest here: {busiest}, {part:.0%} of the time."]


def facts(plan: ServedPlan) -> dict[str, Any]:
    """What the picture says below."""
    step = plan.step
    return {
        "step": step.work.caught,
        "rows a worker": f"{step.work.rows:,}",
        "pulled a step": size(step.pulled),
        "pushed a step": size(step.pushed),
        "computing": number(step.work.total_operations),
        "rule": rule(plan),
    }
