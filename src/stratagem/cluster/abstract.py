"""What all resolvers have in common."""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Mapping

from stratagem import config
from stratagem.cluster.spec import ClusterSpec


class ClusterResolver(abc.ABC):
    """Finds out which tasks a cluster has, and which of them this process is.

    A resolver of your own implements `cluster_spec`, and sets `_task_type`, `_task_id` and
    `_rpc_layer` where it knows them. Nothing here blocks or connects to a task.
    """

    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """The tasks of the cluster, as they are at this call."""

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """The address of a task.

        Args:
            task_type: its job; None for this process's own.
            task_id: its index in the job; None for this process's own.
            rpc_layer: the protocol to put in front; None for this resolver's own, `""` for none.

        Returns:
            The like of `"grpc://host:2222"`; `""` where it is not known which task is meant.

        Raises:
            ValueError: there is no such task.
        """
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        address = self.cluster_spec().task_address(task_type, task_id)
        return format_master_url(address, self.rpc_layer if rpc_layer is None else rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> Mapping[str, int]:
        """Counts the accelerators of this process by kind; starts the JAX backend.

        Args:
            task_type: the job of this process, if given.
            task_id: the index of this process in its job, if given.
            config_proto: for the signature of TensorFlow 1; it says nothing here.

        Returns:
            The like of `{"GPU": 8}`; a kind that is missing counts 0.

        Raises:
            ValueError: another task is named, whose devices this process cannot see.
        """
        own = (self.task_type, self.task_id)
        asked = (
            own[0] if task_type is None else task_type,
            own[1] if task_id is None else task_id,
        )
        if None not in own and asked != own:
            raise ValueError(
                f"num_accelerators: expected this process's own task, {own}. Got {asked}. A "
                "process sees only its own devices: ask on that task, or state the number with "
                "SimpleClusterResolver(..., num_accelerators={'GPU': 8})."
            )
        kinds = (device.partition(":")[0] for device in config.list_devices())
        return Counter(kind for kind in kinds if kind != "CPU")

    @property
    def environment(self) -> str | None:
        """The name of the kind of place that the program runs in; `""` where none has one."""
        return ""

    @property
    def task_type(self) -> str | None:
        """The job of this process, such as `"worker"`; None where it is not known."""
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job; None where it is not known."""
        return self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The protocol that `master` puts in front of an address; None for none."""
        return self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer


def format_master_url(address: str, rpc_layer: str | None = None) -> str:
    """`"grpc://host:2222"` of `"host:2222"` and `"grpc"`; the address alone without a layer."""
    return f"{rpc_layer}://{address}" if rpc_layer else address
