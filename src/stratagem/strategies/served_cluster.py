"""What ParameterServerStrategy asks of a cluster."""

from __future__ import annotations

import logging
import time
from typing import Any

from stratagem.cluster import ClusterResolver, roles
from stratagem.errors import PeerLostError
from stratagem.parameter_server.client import Servers
from stratagem.transport.outgoing import Ticket
from stratagem.transport.thread import HubThread

_PATIENCE_SECONDS = 10.0  # after which it is told who is waited for
_AGAIN_SECONDS = 60.0
_LOOK_SECONDS = 0.01

_log = logging.getLogger("stratagem")


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


def hello(thread: HubThread, servers: Servers, start: bool) -> list[dict[str, Any]]:
    """What each server says of itself, as `Servers.hello`. Tells who is waited for.

    The thread does not wait itself, so that it can be closed meanwhile.
    """
    try:
        return _hello(thread, servers, start)
    except PeerLostError:  # one was restarted since it was asked; all are asked anew
        return _hello(thread, servers, start)


def _hello(thread: HubThread, servers: Servers, start: bool) -> list[dict[str, Any]]:
    asked = thread.submit(lambda hub: _ask(servers, start)).result()
    _watch(asked, servers.seconds)
    answers = thread.submit(lambda hub: servers.wait(asked)).result()
    return [dict(answer.fields) for answer in answers]


def _ask(servers: Servers, start: bool) -> list[Ticket]:
    every = range(len(servers.peers))
    return [servers.post(s, "hello", servers.greeting(s, start)) for s in every]


def _watch(asked: list[Ticket], seconds: float) -> None:
    """Waits until requests are over, which have deadlines."""
    began = time.monotonic()
    due = began + _PATIENCE_SECONDS
    while late := [ticket for ticket in asked if not ticket.done]:
        time.sleep(_LOOK_SECONDS)
        if (now := time.monotonic()) >= due:
            due = now + _AGAIN_SECONDS
            _log.warning(
                "Waiting for %s, since %.0f s and up to %g s. Start what is not started; what runs "
                "has to be in reach, with the same STRATAGEM_CLUSTER_KEY (else its log says that "
                "it refused a connection).",
                ", ".join(str(ticket.peer) for ticket in late), now - began, seconds,
            )  # fmt: skip
