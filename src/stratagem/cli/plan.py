"""`stratagem plan`: what a script's training step will cost on machines that are not here."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from stratagem import config
from stratagem.cli import calibrate, plan_plot, plan_servers, plan_show, plan_trace
from stratagem.cli.plan_run import PlanError, environment, trace_process
from stratagem.planning import machines, predict, topology
from stratagem.planning.program import Program
from stratagem.planning.topology import Topology

_USAGE_ERROR = 2  # As argparse exits.
_FAILED = 1
_STRATEGIES = ("tpu", "gpu", "mirrored", "mwms", "ps")
_DESCRIPTION = """\
Says what a script's training step will cost on machines that are not here. The script runs up to
its first step, under any strategy or none; that step is traced, counted, and not run.

  stratagem plan --strategy tpu --topology v5e:8x8 train.py
  stratagem plan --strategy gpu --topology h100:8x16 train.py    8 GPUs a machine, 16 machines
  stratagem plan --strategy mirrored --topology cpu:4 train.py
  stratagem plan --strategy ps --workers 16 --servers 4 train.py
  stratagem plan --calibrate                                     measures this machine
"""
_EPILOG = """\
What is after the script or module belongs to it. Its output goes to standard error. With libtpu
installed, memory and bytes of a TPU step are the TPU compiler's; else they are estimated.
The exit code is 0; 1 if the script fails or runs no step, 2 for wrong options.
"""


@dataclass(frozen=True)
class Config:
    """What is to be planned.

    Args:
        script: Python file, or name of a module.
        module: it is a module.
        arguments: of the script.
        strategy: one of `_STRATEGIES`.
        topology: as the user wrote it.
        per_device_batch: rows of each device; None for what the script gives.
        json: print JSON instead of tables.
        plot: where a picture goes; None for none.
    """

    script: str
    module: bool
    arguments: tuple[str, ...]
    strategy: str
    topology: str
    per_device_batch: int | None
    json: bool
    plot: Path | None


def add_to(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "plan",
        help="predict time, memory and scaling of a training step",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="stratagem plan [OPTION ...] (SCRIPT | -m MODULE) [ARGUMENT ...]",
        allow_abbrev=False,
    )
    parser.set_defaults(act=act)
    parser.add_argument("--strategy", choices=_STRATEGIES, help="which one is to train")
    plan_servers.add_to(parser)
    parser.add_argument("--topology", metavar="MACHINE:SHAPE", help="such as v5e:8x8, h100:8x16")
    parser.add_argument(
        "--per-device-batch", type=int, metavar="N", help="rows of each device (as the script has)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the plan")
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="measure this machine's constants, which are `cpu` from then on; takes no script",
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="SCRIPT is the name of a module"
    )
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="Python file, or module")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="its arguments"
    )


def act(options: argparse.Namespace) -> int:
    """Runs the parsed command; returns its exit code."""
    if found := faults(options):
        return _refuse(found, _USAGE_ERROR)
    if options.calibrate:
        return calibrate.act(user_file())
    if options.strategy == "ps":
        return _act_served(options)
    wanted = Config(
        options.script,
        options.module,
        tuple(options.arguments),
        options.strategy,
        options.topology,
        options.per_device_batch,
        options.json,
        options.plot,
    )
    try:
        where = place(wanted)
    except ValueError as error:
        return _refuse([str(error)], _USAGE_ERROR)
    try:
        made = predict.plan(trace(wanted, where), where)
        if wanted.plot is not None:
            plan_plot.draw(made, wanted.plot)
    except (PlanError, ImportError) as error:
        return _refuse([str(error)], _FAILED)
    if wanted.json:
        print(plan_show.to_json(made))
    else:
        plan_show.show(made)
    return 0


def _act_served(options: argparse.Namespace) -> int:
    """The same for parameter servers."""
    try:
        made = plan_servers.make(options, user_file())
        if options.plot is not None:
            plan_servers.draw(made, options.plot)
    except ValueError as error:
        return _refuse([str(error)], _USAGE_ERROR)
    except (PlanError, ImportError) as error:
        return _refuse([str(error)], _FAILED)
    plan_servers.show(made, options.json)
    return 0


def faults(options: argparse.Namespace) -> list[str]:
    """A sentence for each fault of the options."""
    if options.calibrate:
        if options.script is None:
            return []
        return [f"--calibrate: expected no script with it. Got {options.script}. Leave it out."]
    found = []
    if options.script is None:
        found.append("expected a SCRIPT to plan. Got none. Write stratagem plan ... train.py.")
    elif not options.module and not Path(options.script).is_file():
        found.append(f"SCRIPT: expected a Python file. Got {options.script}, which is none.")
    if options.strategy is None:
        found.append(f"expected --strategy, one of {', '.join(_STRATEGIES)}. Got none.")
    found += plan_servers.faults(options)
    if options.topology is None and options.strategy != "ps":
        found.append("expected --topology, such as v5e:8x8 or h100:8x16. Got none.")
    if options.per_device_batch is not None and options.per_device_batch < 1:
        found.append(f"--per-device-batch: expected at least 1. Got {options.per_device_batch}.")
    if options.plot is not None:
        if options.plot.suffix not in plan_plot.SUFFIXES:
            wanted = ", ".join(plan_plot.SUFFIXES)
            found.append(f"--plot: expected a name that ends in {wanted}. Got {options.plot}.")
        if not options.plot.absolute().parent.is_dir():
            found.append(f"--plot: expected a folder that is there. Got {options.plot}.")
        if importlib.util.find_spec("matplotlib") is None:
            found.append(
                "--plot: expected matplotlib. Got none. Run pip install 'stratagem[plan]'."
            )
    return found


def place(wanted: Config) -> Topology:
    """The topology that is wanted, of the machines known here.

    Raises:
        ValueError: it is malformed, unknown, or none for the strategy.
    """
    found = topology.parse(wanted.topology, machines.load(user_file()))
    kind = found.machine.kind
    fits = {
        "tpu": kind == "tpu",
        "gpu": kind == "gpu",
        "mirrored": kind != "tpu" and found.shape[1] == 1,
        "mwms": kind != "tpu",
    }
    if not fits[wanted.strategy]:
        expected = {
            "tpu": "a slice of TPUs, such as v5e:8x8",
            "gpu": "GPUs, such as h100:8x16",
            "mirrored": "the devices of one machine, such as h100:8 or cpu:4",
            "mwms": "devices a machine x machines, such as h100:8x16 or cpu:1x4",
        }[wanted.strategy]
        raise ValueError(
            f"--topology: expected {expected} with --strategy {wanted.strategy}. Got "
            f"{wanted.topology}."
        )
    return found


def trace(wanted: Config, where: Topology) -> Program:
    """Runs the script in a process of its own, up to its first step.

    Raises:
        PlanError: the script failed, or ended without a step.
    """
    kind = where.machine.kind
    variables = environment()
    if kind != "cpu":
        variables["STRATAGEM_REHEARSE"] = f"{kind}:1"
    compiler = ""
    if kind == "tpu" and importlib.util.find_spec("libtpu") is not None:
        compiler = str(where)
        # Or libtpu asks Google's metadata server what machine this is, and wants to be alone.
        variables |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
        variables["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

    def asked(out: str) -> str:
        return json.dumps(
            dataclasses.asdict(
                plan_trace.Wanted(
                    out=out,
                    replicas=where.devices,
                    rows=wanted.per_device_batch or 0,
                    compiler=compiler,
                    module=wanted.module,
                )
            )
        )

    script = [wanted.script, *wanted.arguments]
    return Program.from_json(trace_process(plan_trace.__name__, asked, script, variables))


def user_file() -> Path:
    """Where this user's machines are: `machines.toml` in the folder for settings."""
    environment = config.environment()
    base = environment.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "stratagem" / "machines.toml"


def _refuse(found: list[str], code: int) -> int:
    for fault in found:
        print(f"stratagem plan: error: {fault}", file=sys.stderr)
    return code
