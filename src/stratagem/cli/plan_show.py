"""How a plan is shown: as tables, or as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stratagem.cli import terminal
from stratagem.planning import predict
from stratagem.planning.predict import Plan, Step
from stratagem.planning.topology import Topology

_MOSTLY = 3.0  # times their work that kernels take: then half the devices are hardly slower
_SAME = "With the same rows on each device it pays up to"
_COLUMNS = (1, 8, 64, 512, 4096, 65536)  # of the curves, numbers of devices


def to_json(plan: Plan) -> str:
    """One object: `topology`, `program`, `memory`, `step`, `ops`, `scaling`, `wins`, `notes`."""
    machine = plan.topology.machine
    shown = {
        "topology": {"name": str(plan.topology), "devices": plan.topology.devices},
        "machine": asdict(machine),
        "program": {**asdict(plan.program), "total_operations": plan.program.total_operations},
        "memory": {
            "bytes": plan.program.memory,
            "of": machine.memory,
            "fits": plan.fits,
            "by": "compiler" if plan.program.compiled else "estimate",
        },
        "op": plan.op,
        "step": _step(plan.step),
        "rows_per_second": plan.rows_per_second,
        "ops": {op: _step(step) for op, step in plan.steps.items()},
        "scaling": {s.op: asdict(s) for s in plan.scaling},
        "wins": [{"from": devices, "op": op} for devices, op in plan.wins],
        "notes": plan.notes,
    }
    return json.dumps(shown, indent=2)


def _step(step: Step) -> dict[str, Any]:
    return {**asdict(step), "seconds": step.seconds, "bound": step.bound}


def show(plan: Plan, console: Console | None = None) -> None:
    """Prints the program, the step, the ops and how they scale, and what to bear in mind."""
    console = console or terminal.console()
    console.print(_title(plan.topology, plan))
    console.print(_program(plan))
    console.print(_ops(plan))
    console.print(_scaling(plan))
    for line in _advice(plan):
        console.print(Text(f"- {line}"))
    for note in plan.notes:
        console.print(Text(f"! {note}", "yellow"))
    machine = plan.topology.machine
    console.print(Text(f"Constants of {machine.name}: {machine.source}", "dim"))


def _title(topology: Topology, plan: Plan) -> Text:
    """One line: the devices, and the figure that everybody asks for."""
    rate = f", {plan.rows_per_second:,.0f} rows/s" if plan.program.rows else ""
    return Text(
        f"{topology} ({topology.devices} x {topology.machine.title}): "
        f"{time(plan.step.seconds)} a step{rate}",
        "bold",
    )


def _program(plan: Plan) -> Table:
    program, machine, step = plan.program, plan.topology.machine, plan.step
    table = Table(box=box.SIMPLE, show_header=False)
    given = ", ".join(program.strategy)
    table.add_row("step", f"{program.caught} (strategy in the script: {given}); {rows(plan)}")
    by = program.compiled.name if program.compiled else "estimated: state + arguments + live values"
    memory = f"{size(program.memory)} of {size(machine.memory)} a device"
    table.add_row("memory", Text(f"{memory} ({by})", "" if plan.fits else "bold red"))
    kinds = ", ".join(
        f"{number(n)} {kind}" for kind, n in sorted(program.operations.items(), key=lambda i: -i[1])
    )
    table.add_row("operations", f"{number(program.total_operations)} a device ({kinds})")
    moved = program.compiled.bytes if program.compiled else program.bytes
    kernels = f"{program.kernels} kernels"
    table.add_row("memory traffic", f"{size(moved)} a device, in about {kernels}")
    if program.replicas > 1:
        each = " + ".join(size(n) for n in program.reduces) or "none"
        gathers = f"; all-gathers of {' + '.join(map(size, program.gathers))}"
        table.add_row("all-reduce", f"{each} a device{gathers if program.gathers else ''}")
    each = f"{program.kernels} kernels of {time(machine.kernel_seconds)}"
    parts = f"computing {time(step.compute)} ({time(step.kernels)} of it {each}) + all-reduce "
    parts += f"{time(step.reduce)}; input {time(step.input)} at the same time"
    table.add_row("time", f"{parts}; bound by {step.bound}")
    return table


def rows(plan: Plan) -> str:
    """Rows of a step and of a device, in words; of the device alone where there is one."""
    program = plan.program
    if not program.rows:
        return "its rows are not known"
    if program.replicas == 1:
        return f"{program.rows:,} rows"
    return f"{program.rows:,} rows, at most {program.rows_per_replica:,} on a device"


def _ops(plan: Plan) -> Table:
    table = Table(
        "cross-device op", "all-reduce", "step", "rows/s", "efficiency",
        box=box.SIMPLE, title=f"at {plan.topology.devices} devices", title_justify="left",
    )  # fmt: skip
    single = plan.scaling[0].seconds[0]
    for op, step in plan.steps.items():
        rate = f"{plan.program.rows / step.seconds:,.0f}" if plan.program.rows else ""
        style = "bold" if op == plan.op else ""
        cells = (op, time(step.reduce), time(step.seconds), rate, f"{single / step.seconds:.0%}")
        table.add_row(*cells, style=style)
    return table


def _scaling(plan: Plan) -> Table:
    count = plan.program.rows_per_replica
    work = f"{count:,} row{'s' * (count != 1)}" if count else "the same work"
    table = Table(
        "devices", *(f"{n:,}" for n in _COLUMNS), "pays to",
        box=box.SIMPLE, title=f"rows a second and device, of one alone, with {work} on each",
        title_justify="left",
    )  # fmt: skip
    for scaling in plan.scaling:
        cells = (f"{scaling.efficiency[scaling.devices.index(n)]:.0%}" for n in _COLUMNS)
        table.add_row(scaling.op, *cells, f"{scaling.pays_to:,}")
    return table


def _advice(plan: Plan) -> list[str]:
    """Which op to choose, and where more devices stop paying."""
    if not plan.program.reduces and plan.program.replicas > 1:
        return ["The step has no all-reduce: every cross-device op does."]
    best = plan.scaling[0]
    found = [_choice(plan)]
    if best.pays_to == predict.MOST:
        found.append(f"{_SAME} {best.pays_to:,} devices, where this plan ends.")
    else:
        found.append(
            f"{_SAME} {best.pays_to:,} devices: twice as many bring less than "
            f"{predict.WORTH:g} times the rows a second. More rows a device move that limit up."
        )
    remedy = _too_little(plan) if plan.step.bound == predict.KERNELS else _REMEDIES[plan.step.bound]
    return [*found, f"Bound by {plan.step.bound}: {remedy}"]


_REMEDIES = {
    predict.OPERATIONS: "the devices are used. A smaller type (mixed_bfloat16), or faster ones, "
    "help.",
    predict.MEMORY: "the devices wait for their memory. A smaller type (mixed_bfloat16) or fewer, "
    "larger layers help.",
    "all-reduce": "more rows a device, or faster links between the machines, help.",
    "input": "the host cannot feed the devices. Smaller types (uint8 images) help.",
}


def _too_little(plan: Plan) -> str:
    """What to do where the kernels take longer than their work."""
    program, step = plan.program, plan.step
    work, enough, fewer = step.compute - step.kernels, "", ""
    if program.rows_per_replica and work:
        count = program.rows_per_replica * step.kernels / work
        enough = f", {math.ceil(count):,} or more"
    if step.devices > 1 and step.kernels > _MOSTLY * work:
        fewer = " Or take fewer devices: with this batch they are about as fast."
    return (
        f"each device has too little to do for {program.kernels} kernels. Give it more rows"
        f"{enough} (a larger batch in the script, or --per-device-batch to try).{fewer}"
    )


def _choice(plan: Plan) -> str:
    if plan.topology.machine.kind == "tpu":
        return f"TPUStrategy leaves the all-reduce to the chips, as {predict.PLATFORM} does."
    default = ", the default" if plan.op == predict.PLATFORM else ""
    return f"Choose {plan.op}{default}. {_where(plan)}"


def _where(plan: Plan) -> str:
    wins = [f"{op} from {devices:,}" for devices, op in plan.wins]
    if len(wins) == 1:
        return "It is the fastest at any number of devices."
    return f"The fastest by number of devices: {', '.join(wins)}."


def time(seconds: float) -> str:
    """Seconds with three figures and a unit: `"1.23 ms"`."""
    return _scaled(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")))


def size(nbytes: float) -> str:
    """Bytes, likewise; a kilobyte is 1000."""
    return _scaled(nbytes, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")))


def number(operations: float) -> str:
    """Operations, likewise: `"71.7 Mflop"`."""
    units = ((1e15, "Pflop"), (1e12, "Tflop"), (1e9, "Gflop"), (1e6, "Mflop"), (1e3, "kflop"))
    return _scaled(operations, (*units, (1.0, "flop")))


def _scaled(value: float, units: tuple[tuple[float, str], ...]) -> str:
    scale, unit = next((u for u in units if value >= u[0]), units[-1])
    shown = value / scale
    digits = max(0, 2 - (len(str(int(shown))) - 1)) if shown and unit not in ("B", "flop") else 0
    return f"{shown:.{digits}f} {unit}"
