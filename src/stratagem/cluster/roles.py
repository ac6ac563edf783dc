"""What each task of a cluster is there for: pure functions of the cluster and the task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stratagem.cluster.spec import ClusterSpec, Tasks

TASK_TYPES = ("chief", "worker", "ps", "evaluator")
_AT_MOST_ONE = ("chief", "evaluator")
TRAINERS = ("chief", "worker")
SERVING = ("worker", "ps")
"""In a cluster with parameter servers: the tasks that serve its chief, by a generic program."""
_NOT_OURS = {"master": "'master' is the name that TensorFlow 1 had for 'chief': write 'chief'."}


def validate(
    cluster_spec: ClusterSpec | Mapping[str, Tasks],
    task_type: str | None = None,
    task_id: int | None = None,
) -> None:
    """Refuses a cluster, or a task in it, that no strategy can use.

    Args:
        cluster_spec: the cluster, whole.
        task_type: the job of this task, None if there is none. `"evaluator"` may be missing in
            the cluster: it takes no part in training.
        task_id: its index in that job.

    Raises:
        ValueError: all that is wrong, each with what was expected and what was found.
    """
    if found := faults(ClusterSpec(cluster_spec), task_type, task_id):
        raise ValueError("\n".join(found))


def faults(
    cluster: ClusterSpec,
    task_type: str | None,
    task_id: int | None,
    *,
    cluster_field: str = "cluster_spec",
    type_field: str = "task_type",
    id_field: str = "task_id",
) -> list[str]:
    """All that `validate` refuses, a sentence each; the fields are where the user wrote them."""
    types = ", ".join(TASK_TYPES)
    found = [
        f"{cluster_field}: expected jobs out of {types}. Got {job!r}. {_NOT_OURS.get(job, '')}"
        for job in cluster.jobs
        if job not in TASK_TYPES
    ]
    for job in _AT_MOST_ONE:
        if job in cluster.jobs and cluster.num_tasks(job) > 1:
            addresses = list(filter(None, cluster.job_tasks(job)))
            do = "Make the others workers." if job == "chief" else "Leave the others out."
            found.append(
                f"{cluster_field}: expected at most one {job!r}. Got {len(addresses)}: "
                f"{', '.join(addresses)}. {do}"
            )
    if task_type is not None:
        found += _task_faults(cluster, task_type, task_id, cluster_field, type_field, id_field)
    return [sentence.rstrip() for sentence in found]


def is_chief(
    cluster_spec: ClusterSpec | Mapping[str, Tasks], task_type: str | None, task_id: int | None
) -> bool:
    """Whether a task writes the checkpoints and logs of its cluster.

    That is the chief, or worker 0 where there is none; and the evaluator, alone in its own.
    """
    validate(cluster_spec, task_type, task_id)
    if task_type in ("chief", "evaluator"):
        return True
    has_chief = "chief" in ClusterSpec(cluster_spec).jobs
    return not has_chief and (task_type, task_id) == ("worker", 0)


def id_in_cluster(
    cluster_spec: ClusterSpec | Mapping[str, Tasks], task_type: str | None, task_id: int | None
) -> int:
    """The number of a task among those that train: the chief is 0, and the workers follow.

    Raises:
        ValueError: a ps has none; or see `validate`.
    """
    validate(cluster_spec, task_type, task_id)
    if task_id is None or task_type not in (*TRAINERS, "evaluator"):
        raise ValueError(_no_trainer("id_in_cluster", task_type))
    return task_id + _num_tasks(ClusterSpec(cluster_spec), "chief") * (task_type == "worker")


def worker_count(cluster_spec: ClusterSpec | Mapping[str, Tasks], task_type: str | None) -> int:
    """How many tasks run the training step: the chief and the workers; an evaluator is alone.

    Raises:
        ValueError: a ps runs none; or see `validate`.
    """
    cluster = ClusterSpec(cluster_spec)
    if task_type not in (*TRAINERS, "evaluator"):
        raise ValueError(_no_trainer("worker_count", task_type))
    first = min(cluster.task_indices(task_type), default=0) if task_type in cluster.jobs else 0
    validate(cluster, task_type, first)
    if task_type == "evaluator":
        return 1
    return sum(_num_tasks(cluster, job) for job in TRAINERS)


def collective_leader(
    cluster_spec: ClusterSpec | Mapping[str, Tasks], task_type: str | None, task_id: int | None
) -> str:
    """The task that orders the collectives: the chief, else worker 0, as a device prefix.

    Returns:
        The like of `"/job:worker/replica:0/task:0"`; `""` without a cluster and on an evaluator.

    Raises:
        ValueError: the cluster has neither chief nor worker; or see `validate`.
    """
    cluster = ClusterSpec(cluster_spec)
    if not cluster:
        return ""
    validate(cluster, task_type, task_id)
    return "" if task_type == "evaluator" else _first_of(cluster, TRAINERS)


def coordination_leader(cluster_spec: ClusterSpec | Mapping[str, Tasks]) -> str:
    """The task that the others report to: ps 0, else the chief, else worker 0; see above."""
    cluster = ClusterSpec(cluster_spec)
    return _first_of(cluster, ("ps", *TRAINERS)) if cluster else ""


def training_cluster(cluster_spec: ClusterSpec | Mapping[str, Tasks]) -> ClusterSpec:
    """The cluster without its evaluator, which nobody must wait for: it runs no server."""
    cluster = ClusterSpec(cluster_spec).as_dict()
    return ClusterSpec({job: tasks for job, tasks in cluster.items() if job != "evaluator"})


def task_addresses(cluster: ClusterSpec, jobs: Sequence[str] = TASK_TYPES) -> dict[str, str]:
    """Where each task of some jobs listens, by name ("worker 1"), in the order of the jobs."""
    return {
        f"{job} {index}": cluster.task_address(job, index)
        for job in jobs
        if job in cluster.jobs
        for index in cluster.task_indices(job)
    }


def _task_faults(
    cluster: ClusterSpec,
    task_type: str,
    task_id: int | None,
    cluster_field: str,
    type_field: str,
    id_field: str,
) -> list[str]:
    jobs = ", ".join(cluster.jobs) or "none"
    if task_type not in TASK_TYPES:
        return [
            f"{type_field}: expected one out of {', '.join(TASK_TYPES)}. Got {task_type!r}. "
            f"{_NOT_OURS.get(task_type, '')}"
        ]
    if task_type not in (*cluster.jobs, "evaluator"):
        return [
            f"{type_field}: expected a job of the cluster ({jobs}). Got {task_type!r}. Name one of "
            f"these, or add the task's address to {cluster_field}."
        ]
    # An evaluator that the cluster leaves out is the only one.
    indices = cluster.task_indices(task_type) if task_type in cluster.jobs else [0]
    if task_id not in indices:
        return [
            f"{id_field}: expected the index of a {task_type!r} task, one out of {indices}. Got "
            f"{task_id!r}. Indices count from 0 within each job."
        ]
    return []


def _num_tasks(cluster: ClusterSpec, job: str) -> int:
    return cluster.num_tasks(job) if job in cluster.jobs else 0


def _first_of(cluster: ClusterSpec, jobs: tuple[str, ...]) -> str:
    for job in jobs:
        if job in cluster.jobs:
            return f"/job:{job}/replica:0/task:0"
    raise ValueError(
        f"cluster_spec: expected a task out of {', '.join(jobs)} to lead the cluster. Got only "
        f"{', '.join(cluster.jobs)}. Add the address of one."
    )


def _no_trainer(what: str, task_type: str | None) -> str:
    return (
        f"{what}: expected the task type chief, worker or evaluator. Got {task_type!r}. Only tasks "
        "that run the training step are counted."
    )
