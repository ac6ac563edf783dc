"""Slurm: `srun` places the tasks of a job inside an allocation; else a batch script is written.

In the allocation, this process hosts the coordination service and waits for `srun`, which starts
`python -m stratagem.launcher.slurm_task` once for each task: that finds out which task it is, as
`SlurmClusterResolver` does, and turns into the user's program. After a failure, or when all tasks
have left with 42, the job is put back into Slurm's queue, as often as `--max-restarts` says, and
runs from its last backup. (Slurm counts both alike.)
"""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from stratagem.launcher.abstract import (
    ATTEMPT,
    COORDINATION,
    TF_CONFIG,
    Job,
    Launcher,
    LaunchError,
    Task,
    merged,
    service_command,
    write_text,
)
from stratagem.launcher.local import LocalExecutor, ServiceCommand, free_ports
from stratagem.launcher.output import Output
from stratagem.launcher.process import Process
from stratagem.launcher.supervisor import Plan, Post, Running, Supervisor
from stratagem.recovery.policy import PREEMPTED, Limits

JOBS = "STRATAGEM_SLURM_JOBS"
"""Tells a task of the step what the whole job is: JSON, type -> number of tasks."""

OWN_GPUS = "STRATAGEM_SLURM_OWN_GPUS"
"""Set where Slurm has given each task its own GPUs; else the tasks of a node share them out."""

_JOB_ID = "SLURM_JOB_ID"
_RESTARTS = "SLURM_RESTART_COUNT"  # Missing before the job was put back for the first time.
_STEP = Task("srun", 0)
# Seconds that Slurm leaves the others once one has ended. (It is not told to end them at once:
# tasks that save before they leave with 42 do not all end at the same moment.)
_OTHERS_SECONDS = 60
_NOTICE_SECONDS = 120  # So long before the end of its time the job is asked to save and leave.

RunCommand = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


class SlurmLauncher(Launcher):
    """Runs a job as a step of the allocation that it is in, else writes a batch script.

    Args:
        environment: the variables that tasks inherit, and Slurm's own.
        name: of the job, in the script.
        path: where the script is written; None for standard output.
        output: the terminal; None for that of this process.
        service: address and number of tasks -> the command of the coordination service.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        name: str = "stratagem",
        path: Path | None = None,
        output: Output | None = None,
        service: ServiceCommand = service_command,
    ) -> None:
        self._environment, self._name, self._path = environment, name, path
        self._output, self._service = output, service

    def launch(self, job: Job) -> int:
        if job.servers or job.evaluator:
            raise LaunchError(
                "--on slurm: expected a chief and workers only. Got parameter servers or an "
                "evaluator, which run until they are ended; a Slurm step ends when all its tasks "
                "have. Run these with --hosts, one command on each node of the allocation: srun "
                "--ntasks-per-node=1 stratagem run --hosts ..."
            )
        if _JOB_ID not in self._environment:
            write_text(batch_script(job, self._name), self._path)
            return 0
        output = self._output or Output([_STEP])
        executor = SlurmExecutor(self._environment, self._service)
        code = Supervisor(replace(job, limits=Limits()), executor, output).run()
        if self._comes_back(code, job.limits.max_restarts):
            self._requeue(output)
        return code

    def _comes_back(self, code: int, allowed: int) -> bool:
        if code == PREEMPTED:
            return allowed > 0
        stopped = code in (128 + signal.SIGINT, 128 + signal.SIGTERM)
        return bool(code) and not stopped and self._restarts() < allowed

    def _restarts(self) -> int:
        return int(self._environment.get(_RESTARTS, "0"))

    def _requeue(self, output: Output) -> None:
        command = ["scontrol", "requeue", self._environment[_JOB_ID]]
        output.say(f"back into Slurm's queue: {shlex.join(command)}")
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            output.say(f"scontrol refused: {done.stderr.strip()}", "bold red")
        output.flush()


class SlurmExecutor(LocalExecutor):
    """One step of an allocation, which stands for all tasks. Arguments as `LocalExecutor`."""

    _serves_others = True

    def plan(self, job: Job, attempt: int) -> Plan:
        if shutil.which("srun", path=self._environment.get("PATH")) is None:
            raise LaunchError(
                f"--on slurm: expected srun on the PATH, for {_JOB_ID} is set. Got none. Load "
                "Slurm's module; or unset the variable, and a batch script is written."
            )
        address = f"{socket.gethostname()}:{free_ports(1, '')[0]}" if job.coordinated else None
        return Plan({_STEP: ""}, (_STEP,), address, hosts_service=job.coordinated)

    def start(self, job: Job, task: Task, told: Mapping[str, str], post: Post) -> Running:
        step = {**told, JOBS: json.dumps(job.counts())}
        step[ATTEMPT] = self._environment.get(_RESTARTS, "0")
        if self._coordination is not None:
            step[COORDINATION] = self._coordination
        if job.gpus_per_worker is not None:
            step[OWN_GPUS] = "1"
        environment = merged(self._environment, step)
        del environment[TF_CONFIG]  # Each task makes its own.
        return _Step(self._run(task, srun_command(job), environment, post))

    def start_service(self, plan: Plan, tasks: int, post: Post) -> Running:
        self._coordination = plan.coordination
        return super().start_service(plan, tasks, post)

    _coordination: str | None = None


class _Step(Running):
    """A process `srun`, which passes SIGTERM on to its tasks (SIGINT it answers with a status)."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def signal(self, signum: int) -> None:
        self._process.signal(signal.SIGTERM)

    def kill(self) -> None:
        self._process.kill()


def srun_command(job: Job) -> list[str]:
    """The step: every task of the job, with its rank in front of each line."""
    gpus = [] if job.gpus_per_worker is None else [f"--gpus-per-task={job.gpus_per_worker}"]
    return [
        "srun",
        f"--ntasks={len(job.tasks())}",
        "--distribution=block",  # As SlurmClusterResolver counts.
        "--kill-on-bad-exit=0",
        f"--wait={_OTHERS_SECONDS}",
        "--label",
        *gpus,
        sys.executable,
        "-m",
        "stratagem.launcher.slurm_task",
        *job.program,
    ]


def batch_script(job: Job, name: str) -> str:
    """A script for `sbatch`, whose own options on its command line overrule those in it."""
    options = [
        f"--job-name={name}",
        f"--ntasks={len(job.tasks())}",
        "--open-mode=append",
        f"--signal=B:TERM@{_NOTICE_SECONDS}",
    ]
    if job.gpus_per_worker is not None:
        options.append(f"--gpus-per-task={job.gpus_per_worker}")
    if job.limits.max_restarts:
        options.append("--requeue")
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options), ""]
    command = [sys.executable, "-m", "stratagem.cli", "run", "--on", "slurm", *_options(job)]
    # In place of the shell, so that Slurm's SIGTERM reaches it.
    return "\n".join([*lines, f"exec {shlex.join([*command, *job.program])}", ""])


def _options(job: Job) -> list[str]:
    """The options of `stratagem run` that describe a job of chief and workers."""
    options = ["--workers", str(job.workers)] + ["--chief"] * job.chief
    for flag, value in {
        "--devices-per-worker": job.devices_per_worker,
        "--gpus-per-worker": job.gpus_per_worker,
        "--max-restarts": job.limits.max_restarts or None,
        "--grace": job.grace_seconds,
    }.items():
        options += [] if value is None else [flag, f"{value:g}"]
    return options
