"""Ray: a placement group for the job, and one actor a task, which runs it as a process.

Ray finds the machines and moves the group when one is lost; the supervisor is the same as on one
machine, and runs in the driver, beside the coordination service. When an actor or the driver ends,
however it ends, so do its tasks.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from stratagem.launcher.abstract import (
    Job,
    Launcher,
    LaunchError,
    Task,
    merged,
    service_command,
)
from stratagem.launcher.local import LocalExecutor, ServiceCommand, free_ports
from stratagem.launcher.output import Output
from stratagem.launcher.ray_task import RayTask
from stratagem.launcher.supervisor import Exited, Plan, Post, Running, Supervisor

_PLACE_SECONDS = 300
_SAY_SECONDS = 10
_LOST = -9  # A machine or an actor that is gone took its task with it.
_OURS = "STRATAGEM_"
_ADDRESS = "RAY_ADDRESS"
# `start` and `address` return at once; `poll` waits, while `signal` has to get through.
_CONCURRENT_CALLS = 4


class RayLauncher(Launcher):
    """Runs a job on the Ray cluster that this machine belongs to, and supervises it.

    The program has to be at the same path on all machines, as after `ray job submit --working-dir`.

    Args:
        environment: of the driver; what begins with STRATAGEM_ goes to the tasks, on top of the
            environment that Ray gives to actors.
        output: the terminal; None for that of this process.
        service: address and number of tasks -> the command of the coordination service.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        output: Output | None = None,
        service: ServiceCommand = service_command,
    ) -> None:
        self._environment, self._output, self._service = environment, output, service

    def launch(self, job: Job) -> int:
        output = self._output or Output(job.tasks())
        ray, connected = _connect(self._environment)
        try:
            executor = RayExecutor(ray, self._environment, output, self._service)
            return Supervisor(job, executor, output).run()
        finally:
            if connected:
                ray.shutdown()


class RayExecutor(LocalExecutor):
    """Tasks as actors; the service is a process of this machine, as in `LocalExecutor`.

    Args:
        ray: the module, connected to a cluster.
        environment: as for `RayLauncher`.
        output: is told what is waited for.
        service: as for `RayLauncher`.
    """

    _serves_others = True

    def __init__(
        self,
        ray: ModuleType,
        environment: Mapping[str, str],
        output: Output,
        service: ServiceCommand = service_command,
    ) -> None:
        super().__init__(environment, service)
        self._ray, self._output = ray, output
        self._told = {k: v for k, v in environment.items() if k.startswith(_OURS)}
        self._actors: dict[Task, Any] = {}
        self._group: Any = None

    def plan(self, job: Job, attempt: int) -> Plan:
        """Raises LaunchError where Ray has no room for the job."""
        tasks = job.tasks()
        if self._group is None:
            self._group = self._place([_bundle(job, task) for task in tasks])
        self._end_actors()
        self._actors = {task: self._actor(job, task) for task in tasks}
        found = self._ray.get([self._actors[task].address.remote() for task in tasks])
        service = f"{self._ray.util.get_node_ip_address()}:{free_ports(1, '')[0]}"
        return Plan(
            dict(zip(tasks, found, strict=True)),
            tuple(tasks),
            service if job.coordinated else None,
            hosts_service=job.coordinated,
        )

    def start(self, job: Job, task: Task, told: Mapping[str, str], post: Post) -> Running:
        actor = self._actors.get(task)
        if actor is None:  # It replaces one that has ended.
            actor = self._actors[task] = self._actor(job, task)
        variables, program = merged(self._told, told), job.program_of(task.type)
        return _Remote(self._ray, actor, task, program, variables, post, self._actors)

    def close(self) -> None:
        super().close()
        self._end_actors()
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
            self._group = None

    def _actor(self, job: Job, task: Task) -> Any:
        strategies = self._ray.util.scheduling_strategies
        place = strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=job.tasks().index(task)
        )
        bundle = _bundle(job, task)
        options = {
            "num_cpus": bundle["CPU"],
            "num_gpus": bundle.get("GPU", 0),
            "scheduling_strategy": place,
            "max_concurrency": _CONCURRENT_CALLS,
        }
        return self._ray.remote(**options)(RayTask).remote(task, str(Path.cwd()))

    def _end_actors(self) -> None:
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._actors = {}

    def _place(self, bundles: list[dict[str, int]]) -> Any:
        group = self._ray.util.placement_group(bundles, strategy="PACK")
        for waited in range(0, _PLACE_SECONDS, _SAY_SECONDS):
            if group.wait(timeout_seconds=_SAY_SECONDS):
                return group
            wanted = f"{len(bundles)} bundles {bundles}, free are {self._free()}"
            self._output.say(
                f"waiting for Ray to place {wanted} ({waited + _SAY_SECONDS} s of "
                f"{_PLACE_SECONDS} s)"
            )
            self._output.flush()
        self._ray.util.remove_placement_group(group)
        raise LaunchError(
            f"--on ray: expected room for a placement group of {bundles} within {_PLACE_SECONDS} "
            f"s. The cluster has {self._ray.cluster_resources()}, of which {self._free()} are "
            "free. Ask for fewer tasks or GPUs, or add machines."
        )

    def _free(self) -> dict[str, float]:
        return {k: v for k, v in self._ray.available_resources().items() if k in ("CPU", "GPU")}


class _Remote(Running):
    """A task in an actor, and a thread that fetches what it posts.

    The actor ends with its task, so that a replacement gets a fresh one.
    """

    def __init__(
        self,
        ray: ModuleType,
        actor: Any,
        task: Task,
        program: tuple[str, ...],
        variables: Mapping[str, str],
        post: Post,
        actors: dict[Task, Any],
    ) -> None:
        self._ray, self._actor, self._task, self._post = ray, actor, task, post
        self._actors = actors
        actor.start.remote(program, dict(variables))
        threading.Thread(target=self._fetch, daemon=True).start()

    def signal(self, signum: int) -> None:
        self._actor.signal.remote(signum)

    def kill(self) -> None:
        self._actor.kill.remote()

    def _fetch(self) -> None:
        end = None
        while end is None:
            try:
                messages = self._ray.get(self._actor.poll.remote())
            except self._ray.exceptions.RayError:
                end = Exited(self._task, _LOST)
                break
            for message in messages:
                if isinstance(message, Exited):
                    end = message
                else:
                    self._post(message)
        if self._actors.get(self._task) is self._actor:
            del self._actors[self._task]
        self._ray.kill(self._actor)
        self._post(end)


def _bundle(job: Job, task: Task) -> dict[str, int]:
    gpus = job.gpus_per_worker if job.computes(task.type) else None
    return {"CPU": 1} if gpus is None else {"CPU": 1, "GPU": gpus}


def _connect(environment: Mapping[str, str]) -> tuple[ModuleType, bool]:
    """The module ray, connected to a cluster, and whether that was done here."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise LaunchError(
            "--on ray: expected the package ray. Got none. Run pip install 'stratagem[ray]', in "
            "the version of the cluster."
        ) from error
    if ray.is_initialized():
        return ray, False
    address = environment.get(_ADDRESS, "auto")
    try:
        ray.init(address=address, log_to_driver=False, logging_level="warning")
    except ConnectionError as error:
        raise LaunchError(
            f"--on ray: expected a running Ray cluster at {address}. Got: {error} Start one with "
            f"ray start --head, or set {_ADDRESS}."
        ) from error
    return ray, True
