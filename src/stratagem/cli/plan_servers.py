"""The parameter-server part of `stratagem plan`: `--strategy ps --workers W --servers P`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stratagem.cli import plan_servers_plot, plan_servers_show, plan_trace_servers
from stratagem.cli.plan_run import PlanError, environment, trace_process
from stratagem.planning import machines, served_plan
from stratagem.planning.machines import Machine
from stratagem.planning.served import Served
from stratagem.planning.served_plan import ServedPlan
from stratagem.strategies.parameter_server import HYBRID, SYNCHRONOUS, Consistency

MACHINE = "m5_8xlarge"
_OWN = (
    "workers", "servers", "machine", "consistency", "max_staleness", "backup_workers", "table_rows",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Config:
    """What is to be planned.

    Args:
        script: Python file, or name of a module.
        module: it is a module.
        arguments: of the script.
        workers: how many.
        servers: how many.
        machine: of each task; its name.
        rows: of each worker; None for what the script gives.
        rule: of consistency; None for the script's.
        table_rows: distinct rows of a step, by table; under "" of all others.
        seed: of the simulation.
    """

    script: str
    module: bool
    arguments: tuple[str, ...]
    workers: int
    servers: int
    machine: str = MACHINE
    rows: int | None = None
    rule: Consistency | None = None
    table_rows: Mapping[str, int] = dataclasses.field(default_factory=dict)
    seed: int = 0


def add_to(parser: argparse.ArgumentParser) -> None:
    """Adds the options that go with `--strategy ps`."""
    group = parser.add_argument_group("with --strategy ps")
    group.add_argument("--workers", type=int, metavar="W", help="how many workers")
    group.add_argument("--servers", type=int, metavar="P", help="how many parameter servers")
    group.add_argument(
        "--machine", metavar="NAME", help=f"of each of them, in machines.toml ({MACHINE})"
    )
    group.add_argument(
        "--consistency",
        choices=("asynchronous", SYNCHRONOUS, HYBRID),
        help="instead of what the script says",
    )
    group.add_argument("--max-staleness", type=int, metavar="K", help="likewise")
    group.add_argument("--backup-workers", type=int, metavar="N", help="likewise")
    group.add_argument(
        "--table-rows",
        action="append",
        metavar="[TABLE=]N",
        help="distinct rows of a step (those of the script's first batch)",
    )
    group.add_argument("--seed", type=int, default=0, help="of the simulation (0)")


def faults(options: argparse.Namespace) -> list[str]:
    """A sentence for each fault of these options."""
    if options.strategy != "ps":
        given = [name for name in _OWN if getattr(options, name) is not None]
        said = [f"--{name.replace('_', '-')}" for name in given]
        if said and options.strategy is not None:
            return [
                f"{', '.join(said)}: expected --strategy ps with it. Got {options.strategy}. "
                "Leave it out; --topology says how many devices there are."
            ]
        return []
    found = []
    for name in ("workers", "servers"):
        count = getattr(options, name)
        if count is None or count < 1:
            found.append(f"--{name}: expected a number from 1 on with --strategy ps. Got {count}.")
    if options.topology is not None:
        found.append(
            "--topology: expected --workers, --servers and --machine with --strategy ps. Got "
            f"{options.topology}. Leave it out."
        )
    try:
        rule_of(options)
        table_rows(options.table_rows or ())
    except ValueError as error:
        found.append(str(error))
    return found


def rule_of(options: argparse.Namespace) -> Consistency | None:
    """The rule that the options name; None for none.

    Raises:
        ValueError: there is no such rule.
    """
    said = {
        "mode": options.consistency,
        "max_staleness": options.max_staleness,
        "backup_workers": options.backup_workers,
    }
    said = {key: value for key, value in said.items() if value is not None}
    return Consistency(**said) if said else None


def table_rows(said: Sequence[str]) -> dict[str, int]:
    """Rows by table of `--table-rows`.

    Raises:
        ValueError: one is malformed.
    """
    found = {}
    for each in said:
        name, _, number = each.rpartition("=")
        if not number.isdigit() or not int(number):
            raise ValueError(
                f"--table-rows: expected a number from 1 on, or TABLE=NUMBER. Got {each!r}."
            )
        found[name] = int(number)
    return found


def machine_of(name: str, known: Mapping[str, Machine]) -> Machine:
    """The machine of a name.

    Raises:
        ValueError: there is none, or it does not say what it costs to serve on it.
    """
    fits = sorted(each.name for each in known.values() if each.serving is not None)
    if name not in fits:
        raise ValueError(
            f"--machine: expected one of {', '.join(fits)}. Got {name!r}. Describe another one in "
            "the file that --calibrate writes, with a table [NAME.serving]."
        )
    return known[name]


def make(options: argparse.Namespace, user_file: Path) -> ServedPlan:
    """Traces the script, and predicts.

    Raises:
        ValueError: the options are wrong.
        PlanError: the script failed, or ended without a step.
    """
    wanted = Config(
        options.script,
        options.module,
        tuple(options.arguments),
        options.workers,
        options.servers,
        options.machine or MACHINE,
        options.per_device_batch,
        rule_of(options),
        table_rows(options.table_rows or ()),
        options.seed,
    )
    machine = machine_of(wanted.machine, machines.load(user_file))
    step, rule = trace(wanted)
    if unknown := sorted(set(wanted.table_rows) - {"", *(t.name for t in step.tables)}):
        raise PlanError(
            f"--table-rows: expected tables of {', '.join(t.name for t in step.tables) or 'none'}. "
            f"Got {', '.join(unknown)}. Use these names."
        )
    return served_plan.plan(step, machine, wanted.workers, rule, wanted.seed)


def trace(wanted: Config) -> tuple[Served, dict[str, Any]]:
    """Runs the script in a process of its own, up to its first step; also gives its rule.

    Raises:
        PlanError: the script failed, or ended without a step.
    """

    def asked(out: str) -> str:
        return json.dumps(
            dataclasses.asdict(
                plan_trace_servers.Wanted(
                    out=out,
                    workers=wanted.workers,
                    servers=wanted.servers,
                    rows=wanted.rows or 0,
                    table_rows=dict(wanted.table_rows),
                    rule=None if wanted.rule is None else dataclasses.asdict(wanted.rule),
                    module=wanted.module,
                )
            )
        )

    script = [wanted.script, *wanted.arguments]
    said = json.loads(trace_process(plan_trace_servers.__name__, asked, script, environment()))
    return Served.from_json(said["served"]), said["rule"]


def show(made: ServedPlan, as_json: bool) -> None:
    """Prints it."""
    if as_json:
        print(plan_servers_show.to_json(made))
    else:
        plan_servers_show.show(made)


def draw(made: ServedPlan, path: Path) -> None:
    """Draws it; see `plan_servers_plot.draw`."""
    plan_servers_plot.draw(made, path)
