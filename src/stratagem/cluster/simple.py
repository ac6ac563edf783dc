"""The resolver that is told everything."""

from __future__ import annotations

from collections.abc import Mapping

from stratagem.cluster.abstract import ClusterResolver, format_master_url
from stratagem.cluster.spec import ClusterSpec


class SimpleClusterResolver(ClusterResolver):
    """A resolver of explicit values.

    Args:
        cluster_spec: the tasks of the cluster.
        master: what `master()` gives when it is not asked for a certain task.
        task_type: the job of this process.
        task_id: its index in that job.
        environment: what `environment` gives.
        num_accelerators: what `num_accelerators` gives, such as `{"GPU": 8}`; None for `{}`.
        rpc_layer: the protocol that `master` puts in front of an address.

    Raises:
        TypeError: `cluster_spec` is no `ClusterSpec`, or `master` no string.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError(
                f"cluster_spec: expected a ClusterSpec. Got {cluster_spec!r}. Wrap it: "
                "stratagem.cluster_resolver.ClusterSpec(...)."
            )
        if not isinstance(master, str):
            raise TypeError(f"master: expected a string. Got {master!r}.")
        self._cluster_spec = cluster_spec
        self._master = master
        self._task_type = task_type
        self._task_id = task_id
        self._environment = environment
        self._num_accelerators = dict(num_accelerators or {})
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """The cluster given at the start."""
        return self._cluster_spec

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """The address of the task asked for; the master given at the start if none is."""
        if task_type is not None and task_id is not None:
            return super().master(task_type, task_id, rpc_layer)
        return format_master_url(self._master, self.rpc_layer if rpc_layer is None else rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> Mapping[str, int]:
        """The numbers given at the start, for every task; nothing is detected."""
        return dict(self._num_accelerators)

    @property
    def environment(self) -> str | None:
        return self._environment
