"""Several resolvers as one."""

from __future__ import annotations

from collections.abc import Mapping

from stratagem.cluster.abstract import ClusterResolver
from stratagem.cluster.spec import ClusterSpec


class UnionResolver(ClusterResolver):
    """The tasks of all resolvers in one cluster; everything else comes from the first one.

    Args:
        *resolvers: at least one.
        rpc_layer: the protocol, instead of the first resolver's.
        task_type: the job of this process, instead of the first resolver's.
        task_id: the index of this process in its job, instead of the first resolver's.

    Raises:
        TypeError: some of `resolvers` are no resolvers; all of them are named.
        ValueError: there is none.
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        rpc_layer: str | None = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        if not resolvers:
            raise ValueError("UnionResolver: expected at least one ClusterResolver. Got none.")
        if others := [r for r in resolvers if not isinstance(r, ClusterResolver)]:
            raise TypeError(f"UnionResolver: expected ClusterResolvers only. Got {others}.")
        self._resolvers = resolvers
        self._rpc_layer = rpc_layer
        self._task_type = task_type
        self._task_id = task_id

    def cluster_spec(self) -> ClusterSpec:
        """The jobs of all resolvers, and of a job the tasks of all.

        Lists are put one after the other; a task that several list, at the same address, is there
        once. Where a resolver leaves out indices of a job, all keep the indices they give.

        Raises:
            KeyError: indices of such a job are given by several resolvers; all are named.
            ValueError: tasks of different indices or jobs have one address.
        """
        parts: dict[str, list[list[str] | dict[int, str]]] = {}
        for resolver in self._resolvers:
            for job, tasks in resolver.cluster_spec().as_dict().items():
                parts.setdefault(job, []).append(tasks)
        return ClusterSpec({job: _merge(job, tasks) for job, tasks in parts.items()})

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """The address of the task asked for; what the first resolver gives if none is."""
        if task_type is not None and task_id is not None:
            return super().master(task_type, task_id, rpc_layer)
        rpc_layer = self._rpc_layer if rpc_layer is None else rpc_layer
        return self._resolvers[0].master(rpc_layer=rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> Mapping[str, int]:
        """What the first resolver gives."""
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)

    @property
    def environment(self) -> str | None:
        return self._resolvers[0].environment

    @property
    def task_type(self) -> str | None:
        return self._resolvers[0].task_type if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        return self._resolvers[0].task_id if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        return self._resolvers[0].rpc_layer if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer


def _merge(job: str, parts: list[list[str] | dict[int, str]]) -> list[str] | dict[int, str]:
    lists = [part for part in parts if isinstance(part, list)]
    if len(lists) == len(parts):
        # A dict keeps the first place of an address that comes again.
        return list(dict.fromkeys(address for part in lists for address in part))
    merged: dict[int, str] = {}
    twice: list[str] = []
    for part in parts:
        for index, address in enumerate(part) if isinstance(part, list) else part.items():
            if index in merged:
                twice.append(f"{index} ({merged[index]} and {address})")
            merged.setdefault(index, address)
    if twice:
        raise KeyError(
            f"UnionResolver: expected each index of job {job!r} from one resolver only. Got "
            f"{', '.join(twice)} twice. Give the tasks different indices."
        )
    return merged
