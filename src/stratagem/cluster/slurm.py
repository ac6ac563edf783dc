"""The cluster as a Slurm job step describes it to its tasks."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping

from stratagem import config
from stratagem.cluster.abstract import ClusterResolver
from stratagem.cluster.hostlist import expand_hostlist, expand_tasks_per_node
from stratagem.cluster.spec import ClusterSpec

_RANK = "SLURM_PROCID"
_NUM_TASKS = "SLURM_STEP_NUM_TASKS"
_HOSTS = "SLURM_STEP_NODELIST"
_TASKS_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"
_OWN_HOST = "SLURMD_NODENAME"
_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
_NVIDIA_SMI = ("nvidia-smi", "--list-gpus")
_NO_GPU = ("", "-1", "NoDevFiles")  # What CUDA_VISIBLE_DEVICES says for none.


class SlurmClusterResolver(ClusterResolver):
    """A resolver for the tasks of a Slurm job step (`srun`).

    Task `r` of the step (SLURM_PROCID) is the r-th in the order of the hosts, and the r-th of the
    jobs sorted by name. It listens on the base port plus its place on its host.

    Args:
        jobs: job name -> number of tasks; None: as many workers as the step has tasks.
        port_base: the port of the first task on each host.
        gpus_per_node: GPUs on each host; None: those that CUDA_VISIBLE_DEVICES lists, or that
            nvidia-smi finds, or 0 where there is no nvidia-smi.
        gpus_per_task: GPUs for each task; None: the host's, divided evenly.
        tasks_per_node: tasks on each host, or a dict host -> tasks; None: as Slurm says.
        auto_set_gpu: whether `cluster_spec` leaves this process only its own GPUs.
        rpc_layer: the protocol that `master` puts in front of an address.
        env: the environment variables; None for those of this process.
        set_visible_gpus: takes the own GPUs, `"0,1"`; None: `config.set_visible_gpus`.

    Raises:
        RuntimeError: this is no Slurm step, or it has not the tasks or GPUs asked for.
        ValueError: a variable of Slurm is malformed.
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
        *,
        env: Mapping[str, str] | None = None,
        set_visible_gpus: Callable[[str], None] | None = None,
    ) -> None:
        env = config.environment() if env is None else env
        rank = _number(env, _RANK)
        jobs = {"worker": _number(env, _NUM_TASKS)} if jobs is None else jobs
        tasks_on = _tasks_on_hosts(env, tasks_per_node)
        places = [(host, place) for host, tasks in tasks_on.items() for place in range(tasks)]
        _check_tasks(jobs, len(places), rank)
        _check_own_host(env, rank, places[rank][0])

        visible = _visible_gpus(env) if gpus_per_node is None or auto_set_gpu else []
        most_tasks = max(tasks_on.values())
        per_node = len(visible) if gpus_per_node is None else gpus_per_node
        if gpus_per_task is None and 0 < per_node < most_tasks:
            raise RuntimeError(_too_few_gpus(per_node, most_tasks))
        per_task = per_node // most_tasks if gpus_per_task is None else gpus_per_task
        if most_tasks * per_task > per_node:
            raise RuntimeError(
                f"Requested more GPUs per node than available: expected at most {per_node} on a "
                f"node. Got {most_tasks} tasks with {per_task} each. Lower gpus_per_task or the "
                "tasks per node."
            )
        if len(visible) < per_node:  # The caller knows more than the environment.
            visible = [str(gpu) for gpu in range(per_node)]
        first = places[rank][1] * per_task

        addresses = [f"{host}:{port_base + place}" for host, place in places]
        ranks = _ranks_by_job(jobs)
        self._cluster_spec = ClusterSpec(
            {job: [addresses[r] for r in members] for job, members in ranks.items()}
        )
        self._task_type = next(job for job, members in ranks.items() if rank in members)
        self._task_id = rank - ranks[self._task_type].start
        self._rpc_layer = rpc_layer
        self._gpus_per_task = per_task
        self._own_gpus = ",".join(visible[first : first + per_task]) if auto_set_gpu else ""
        self._set_visible_gpus = set_visible_gpus or config.set_visible_gpus

    def cluster_spec(self) -> ClusterSpec:
        """The tasks of the step; leaves this process only its own GPUs, if it has any.

        Raises:
            RuntimeError: it is too late for that, because the JAX backend has started.
        """
        if self._own_gpus:
            self._set_visible_gpus(self._own_gpus)
        return self._cluster_spec

    def get_task_info(self) -> tuple[str | None, int | None]:
        """The job of this process and its index in it."""
        return self.task_type, self.task_id

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> Mapping[str, int]:
        """The GPUs of each task, all tasks alike."""
        return {"GPU": self._gpus_per_task}


def _ranks_by_job(jobs: Mapping[str, int]) -> dict[str, range]:
    """Which ranks of the step make up each job. Sorted, so that all tasks agree on it."""
    ranks: dict[str, range] = {}
    start = 0
    for job, tasks in sorted(jobs.items()):
        ranks[job] = range(start, start + tasks)
        start += tasks
    return ranks


def _tasks_on_hosts(
    env: Mapping[str, str], tasks_per_node: int | Mapping[str, int] | None
) -> dict[str, int]:
    """Host -> tasks, in the order in which Slurm counts its tasks."""
    if isinstance(tasks_per_node, Mapping):
        # Slurm's own order is right where it is known, and any that all tasks share otherwise.
        known = expand_hostlist(env[_HOSTS]) if _HOSTS in env else []
        order = [host for host in known if host in tasks_per_node]
        order += sorted(host for host in tasks_per_node if host not in known)
        return {host: tasks_per_node[host] for host in order}
    hosts = expand_hostlist(_variable(env, _HOSTS))
    if tasks_per_node is not None:
        return dict.fromkeys(hosts, int(tasks_per_node))
    counts = expand_tasks_per_node(_variable(env, _TASKS_PER_NODE))
    if len(counts) != len(hosts):
        raise RuntimeError(
            f"{_TASKS_PER_NODE}: expected a number for each of the {len(hosts)} hosts in "
            f"{_HOSTS}={env[_HOSTS]}. Got {env[_TASKS_PER_NODE]}. Both come from srun: do not set "
            "one of them."
        )
    return dict(zip(hosts, counts, strict=True))


def _check_tasks(jobs: Mapping[str, int], assigned: int, rank: int) -> None:
    wanted = sum(jobs.values())
    if wanted != assigned:
        raise RuntimeError(
            f"Requested {wanted} tasks but {assigned} were assigned: expected jobs={dict(jobs)} to "
            "have as many tasks as the Slurm step. Change jobs, tasks_per_node or srun --ntasks."
        )
    if not 0 <= rank < assigned:
        raise RuntimeError(
            f"{_RANK}: expected a rank below {assigned}, the number of tasks. Got {rank}. Does "
            "tasks_per_node name all hosts of the step?"
        )


def _check_own_host(env: Mapping[str, str], rank: int, expected: str) -> None:
    """Slurm may deal tasks out to hosts in turn; then a task's address would be another's."""
    own = env.get(_OWN_HOST, expected)
    if own != expected:
        raise RuntimeError(
            f"{_OWN_HOST}: expected {expected} for rank {rank}, where hosts are filled one after "
            f"the other. Got {own}. Start the step with srun --distribution=block."
        )


def _visible_gpus(env: Mapping[str, str]) -> list[str]:
    """The GPUs of this host that this step may use, by the names that CUDA has for them."""
    if _VISIBLE_GPUS in env:
        names = [name.strip() for name in env[_VISIBLE_GPUS].split(",")]
        return [name for name in names if name not in _NO_GPU]
    try:
        listed = subprocess.run(_NVIDIA_SMI, capture_output=True, text=True)
    except FileNotFoundError:  # It comes with the driver: no GPU can be used without.
        return []
    if listed.returncode:
        raise RuntimeError(
            f"gpus_per_node: expected {' '.join(_NVIDIA_SMI)} to list the GPUs of this host. Got "
            f"exit status {listed.returncode}: {(listed.stderr or listed.stdout).strip()}. Pass "
            "gpus_per_node."
        )
    count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return [str(gpu) for gpu in range(count)]


def _too_few_gpus(gpus: int, tasks: int) -> str:
    return (
        f"gpus_per_node: expected a GPU at least for each of the {tasks} tasks of a node. Got "
        f"{gpus}. If {_VISIBLE_GPUS} holds one task's share already (srun --gpus-per-task, or a "
        "resolver made before in this process), pass gpus_per_node and gpus_per_task, with "
        "auto_set_gpu=False where Slurm makes the shares; if tasks shall use no GPU, "
        "gpus_per_task=0."
    )


def _variable(env: Mapping[str, str], name: str) -> str:
    if name not in env:
        raise RuntimeError(
            f"{name} not found in the environment: expected to run as a task of a Slurm step. "
            "Start the program with srun."
        )
    return env[name]


def _number(env: Mapping[str, str], name: str) -> int:
    text = _variable(env, name)
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{name}: expected a number. Got {text!r}. srun sets it; do not.")
    return int(text)
