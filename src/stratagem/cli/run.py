"""`stratagem run`: starts the tasks of a job, here or through an engine, and supervises them."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from stratagem import config
from stratagem.cli.faults import faults
from stratagem.launcher.abstract import REHEARSE, Job, Launcher, LaunchError
from stratagem.launcher.hosts import HostsLauncher, own_index, parse_hosts
from stratagem.launcher.kubernetes import KubernetesLauncher
from stratagem.launcher.local import LocalLauncher
from stratagem.launcher.ray import RayLauncher
from stratagem.launcher.serving import surroundings
from stratagem.launcher.slurm import SlurmLauncher
from stratagem.recovery.policy import Limits

_USAGE_ERROR = 2  # As argparse exits.
_DEFAULT_NAME = "stratagem"
_ENGINES = ("local", "slurm", "kubernetes", "ray")
_DESCRIPTION = """\
Starts the tasks of a job, each with its TF_CONFIG, and supervises them.

  stratagem run --workers 2 train.py --epochs 3
  stratagem run --workers 2 --devices-per-worker 2 -m package.train
  stratagem run --workers 2 --ps 2 train.py            only the chief runs train.py
  stratagem run --hosts a,b --workers 4 train.py       once on each of the machines a and b
  stratagem run --on kubernetes --image IMAGE --workers 8 train.py | kubectl apply -f -
"""
_EPILOG = """\
What is after the script or module belongs to it. Without --chief, worker 0 is the chief.

Each line of output has its task in front. When a task fails, the others are ended, and the first
failure and its traceback come last. The exit code is that of the first failure, 128 + n for signal
n; 130 after Ctrl-C; 42 when all tasks have left after saving, to be started again.

With --ps, workers and servers run `stratagem serve`. One that is lost is started again alone; the
chief is so too if --max-restarts is given, and goes on from its journal in --state-dir. Tasks know
each other by STRATAGEM_CLUSTER_KEY, which is made if there is none.
"""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the examples as they are, with room for the longer options."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=100)


def add_to(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "run",
        help="start the tasks of a job, and supervise them",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=_Help,
        usage="stratagem run [OPTION ...] (SCRIPT | -m MODULE) [ARGUMENT ...]",
        allow_abbrev=False,
    )
    parser.set_defaults(act=run)
    tasks = parser.add_argument_group("tasks")
    tasks.add_argument("--workers", type=int, default=1, metavar="N", help="workers (1)")
    tasks.add_argument("--ps", type=int, default=0, metavar="N", help="parameter servers (0)")
    tasks.add_argument(
        "--chief", action="store_true", help="a chief beside the workers; implied by --ps"
    )
    tasks.add_argument("--evaluator", action="store_true", help="an evaluator, outside training")
    tasks.add_argument(
        "--devices-per-worker",
        type=int,
        metavar="K",
        help=f"rehearse on K virtual CPU devices a task ({REHEARSE}=cpu:K, unless it is set)",
    )
    tasks.add_argument(
        "--gpus-per-worker",
        type=int,
        metavar="K",
        help="K GPUs for each task that trains; without it, each sees all of its machine",
    )
    losses = parser.add_argument_group("when a task is lost")
    losses.add_argument(
        "--max-restarts",
        type=int,
        metavar="N",
        help="start the group, or a lost task, again up to N times (0; with --ps each worker and "
        f"server {Limits.task_restarts} times)",
    )
    losses.add_argument(
        "--min-workers",
        type=int,
        metavar="M",
        help="go on without a restart while M workers are left (the chief is one)",
    )
    losses.add_argument(
        "--wait-for-replacement",
        type=float,
        metavar="S",
        help="replace a lost worker; the survivors wait up to S seconds for it to join",
    )
    losses.add_argument(
        "--grace",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds to save and leave after SIGTERM, with --ps also after Ctrl-C (30)",
    )
    losses.add_argument(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="--ps: where snapshots and the journal are kept, to go on from (a temporary one)",
    )
    where = parser.add_argument_group("where")
    where.add_argument("--on", choices=_ENGINES, default="local", help="who places tasks (local)")
    where.add_argument(
        "--hosts",
        metavar="HOST[:PORT],...",
        help="machines, in the same order on each; the command is run once on each of them",
    )
    where.add_argument(
        "--host-index",
        type=int,
        metavar="I",
        help="which of --hosts this machine is; found out by its addresses if left out",
    )
    where.add_argument("--name", help=f"slurm, kubernetes: name of the job ({_DEFAULT_NAME})")
    where.add_argument("--image", help="kubernetes: container image that has the script")
    where.add_argument(
        "--output", type=Path, metavar="FILE", help="slurm, kubernetes: where to write it (stdout)"
    )
    program = parser.add_argument_group("program")
    program.add_argument(
        "-m", dest="module", action="store_true", help="SCRIPT is the name of a module"
    )
    program.add_argument("script", metavar="SCRIPT", help="Python file, or module after -m")
    program.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="its arguments"
    )


def run(options: argparse.Namespace) -> int:
    """Runs the parsed command; returns its exit code."""
    if found := faults(options):
        return _refuse(found)
    job, environment = job_of(options), config.environment()
    try:
        if job.servers and options.on in ("local", "ray"):
            code = _run_served(options, job, environment)
        else:
            code = launcher_of(options, environment).launch(job)
    except LaunchError as error:
        return _refuse([str(error)])
    if code == 128 + signal.SIGPIPE:  # Or Python complains that it cannot write its last words.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _run_served(options: argparse.Namespace, job: Job, environment: Mapping[str, str]) -> int:
    machines = 1 if options.hosts is None else len(parse_hosts(options.hosts))
    with surroundings(environment, options.state_dir, _say, machines=machines) as around:
        code = launcher_of(options, around.environment).launch(job)
        around.succeeded = code == 0
    return code


def job_of(options: argparse.Namespace) -> Job:
    """The job that checked options describe."""
    program = ("-m", options.script) if options.module else (options.script,)
    return Job(
        program=(*program, *options.arguments),
        workers=options.workers,
        servers=options.ps,
        # The chief is the coordinator that hands out the work to servers and workers.
        chief=options.chief or options.ps > 0,
        evaluator=options.evaluator,
        devices_per_worker=options.devices_per_worker,
        gpus_per_worker=options.gpus_per_worker,
        limits=_limits(options),
        grace_seconds=options.grace,
    )


def _limits(options: argparse.Namespace) -> Limits:
    given = options.max_restarts
    return Limits(
        given or 0,
        options.min_workers,
        options.wait_for_replacement,
        Limits.task_restarts if given is None else given,
    )


def launcher_of(options: argparse.Namespace, environment: Mapping[str, str]) -> Launcher:
    """The launcher that checked options ask for; tasks inherit the environment."""
    name = options.name or _DEFAULT_NAME
    if options.on == "slurm":
        return SlurmLauncher(environment, name, options.output)
    if options.on == "kubernetes":
        return KubernetesLauncher(options.image, name, options.output, options.state_dir)
    if options.on == "ray":
        return RayLauncher(environment)
    if options.hosts is None:
        return LocalLauncher(environment)
    hosts = parse_hosts(options.hosts)
    index = own_index(hosts) if options.host_index is None else options.host_index
    return HostsLauncher(hosts, index, environment)


def _say(text: str) -> None:
    print(f"stratagem run: {text}", file=sys.stderr)


def _refuse(found: Sequence[str]) -> int:
    for fault in found:
        print(f"stratagem run: error: {fault}", file=sys.stderr)
    return _USAGE_ERROR
