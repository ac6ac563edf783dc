"""What ParameterServerStrategy asks of a cluster."""

from __future__ import annotations

from typing import Any

from stratagem.cluster import ClusterResolver, roles


def check(cluster: Any, resolver: ClusterResolver) -> None:
    """Raises ValueError for a cluster without workers or servers, or for an evaluator task."""
    roles.validate(cluster, resolver.task_type, resolver.task_id)
    missing = [job for job in roles.SERVING if not (job in cluster.jobs and cluster.num_tasks(job))]
    if missing:
        raise ValueError(
            f"cluster_spec: expected workers and parameter servers (ps). Got {cluster.as_dict()}, "
            f"without {' and '.join(missing)}. Add their addresses, or use "
            "MultiWorkerMirroredStrategy, which needs no servers."
        )
    if resolver.task_type == "evaluator":
        raise ValueError(
            "task_type: expected the coordinator (chief), a worker or a ps. Got 'evaluator', which "
            "takes no part in training. Evaluate checkpoints there, with "
            "stratagem.utils.SidecarEvaluator."
        )


def coordinates(cluster: Any, resolver: ClusterResolver) -> bool:
    """Whether worker 0 is the coordinator too, as in clusters without a chief."""
    return "chief" not in cluster.jobs and (resolver.task_type, resolver.task_id) == ("worker", 0)


def tasks(cluster: Any, job: str) -> list[tuple[str, str]]:
    """Name and address of each task of a job."""
    return list(roles.task_addresses(cluster, (job,)).items())
