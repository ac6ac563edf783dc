"""Joining the hosts of a TPU slice, under the name that TensorFlow has for it."""

from __future__ import annotations

from typing import Any


def experimental_connect_to_cluster(
    cluster_spec_or_resolver: Any,
    job_name: str = "localhost",
    task_index: int = 0,
    protocol: str | None = None,
    make_master_device_default: bool = True,
    cluster_device_filters: Any = None,
) -> None:
    """Joins the job of a TPU slice's hosts. Every host calls it, before it uses JAX.

    On one machine there is nothing to join. A second call does nothing.

    Args:
        cluster_spec_or_resolver: a TPUClusterResolver.
        job_name: accepted for TF's sake, like all that follow: the resolver knows them.
        task_index: likewise.
        protocol: likewise.
        make_master_device_default: likewise.
        cluster_device_filters: likewise.

    Raises:
        TypeError: it is no TPUClusterResolver.
        RuntimeError: JAX has started its devices already.
        PeerTimeoutError: hosts are missing; names them and their addresses.
    """
    del job_name, task_index, protocol, make_master_device_default, cluster_device_filters
    # By its method and not its class: the resolvers stand above this file.
    join = getattr(cluster_spec_or_resolver, "join", None)
    if join is None:
        raise TypeError(
            "experimental_connect_to_cluster: expected a TPUClusterResolver. Got "
            f"{cluster_spec_or_resolver!r}. Other strategies connect by themselves: give the "
            "resolver to the strategy."
        )
    join()
