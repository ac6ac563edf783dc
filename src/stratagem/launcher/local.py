"""All tasks on this machine."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping

from stratagem.launcher.abstract import (
    VISIBLE_GPUS,
    Job,
    Launcher,
    Task,
    gpus_of,
    merged,
    python_command,
    service_command,
)
from stratagem.launcher.output import Output
from stratagem.launcher.process import Process
from stratagem.launcher.supervisor import Executor, Plan, Post, Running, Supervisor
from stratagem.recovery.policy import SERVICE

ServiceCommand = Callable[[str, int], list[str]]
_HOST = "127.0.0.1"


class LocalExecutor(Executor):
    """Tasks as processes of this machine, each attempt on ports that are free then.

    Args:
        environment: the variables that tasks inherit.
        service: address and number of tasks -> the command of the coordination service.
    """

    _serves_others = False  # whether tasks on other machines need the service

    def __init__(
        self, environment: Mapping[str, str], service: ServiceCommand = service_command
    ) -> None:
        self._environment = environment
        self._service = service
        self._started: list[Process] = []

    def plan(self, job: Job, attempt: int) -> Plan:
        tasks = job.tasks()
        *ports, service = free_ports(len(tasks) + 1)
        addresses = {task: f"{_HOST}:{port}" for task, port in zip(tasks, ports, strict=True)}
        coordination = f"{_HOST}:{service}" if job.coordinated else None
        return Plan(addresses, tuple(tasks), coordination, hosts_service=job.coordinated)

    def start(self, job: Job, task: Task, told: Mapping[str, str], post: Post) -> Running:
        if job.gpus_per_worker is not None:
            told = {**told, VISIBLE_GPUS: gpus_of(job, task, self._first_trainer(job))}
        return self._run(task, python_command(job, task), merged(self._environment, told), post)

    def start_service(self, plan: Plan, tasks: int, post: Post) -> Running:
        if plan.coordination is None:
            raise ValueError("start_service: expected a plan with a service. Got none.")
        address = plan.coordination
        if self._serves_others:  # this machine's name may stand for another address of it here
            address = f"0.0.0.0:{address.rpartition(':')[2]}"
        command = self._service(address, tasks)
        return self._run(SERVICE, command, merged(self._environment, {}), post)

    def close(self) -> None:
        for process in self._started:
            process.kill()

    def _run(
        self, name: Task | str, command: list[str], environment: Mapping[str, str], post: Post
    ) -> Process:
        process = Process(name, command, environment, post)
        self._started.append(process)
        return process

    def _first_trainer(self, job: Job) -> int:
        """How many tasks that compute are on machines before this one."""
        return 0


class LocalLauncher(Launcher):
    """Runs all tasks of a job on this machine, and supervises them.

    Args:
        environment: the variables that tasks inherit.
        output: the terminal; None for that of this process.
        service: address and number of tasks -> the command of the coordination service.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        output: Output | None = None,
        service: ServiceCommand = service_command,
    ) -> None:
        self._executor = LocalExecutor(environment, service)
        self._output = output

    def launch(self, job: Job) -> int:
        output = self._output or Output(job.tasks())
        return Supervisor(job, self._executor, output).run()


def free_ports(count: int, host: str = _HOST) -> list[int]:
    """Ports that nobody listens on now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((host, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
