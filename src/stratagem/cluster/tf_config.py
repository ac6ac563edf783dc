"""The cluster as the environment variable TF_CONFIG describes it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stratagem import config
from stratagem.cluster import roles
from stratagem.cluster.abstract import ClusterResolver
from stratagem.cluster.spec import ClusterSpec, loopback_tasks, one_task

_VARIABLE = "TF_CONFIG"
_EXAMPLE = (
    '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'
)
_SHOWN = 200  # Characters of a broken TF_CONFIG that an error shows.
_CALLER = 4  # Stack levels from the warning up to the line that asked a resolver.


@dataclass(frozen=True)
class TFConfig:
    """TF_CONFIG, parsed and checked; a field that it leaves out is None, or an empty cluster."""

    cluster: ClusterSpec
    task_type: str | None
    task_id: int | None
    rpc_layer: str | None
    session_master: str | None


class TFConfigClusterResolver(ClusterResolver):
    """A resolver that reads TF_CONFIG, anew at every access, so that a change is seen.

    Without TF_CONFIG the cluster is empty. An evaluator may be in the cluster or not; strategies
    train on `roles.training_cluster`, without it.

    Args:
        task_type: the job of this process, instead of the one in TF_CONFIG.
        task_id: the index of this process in its job, instead of the one in TF_CONFIG.
        rpc_layer: the protocol, instead of the one in TF_CONFIG.
        environment: what `environment` gives.
        env: the environment variables; None for those of this process.

    Every access raises ValueError, with the field, what was found and what is right, where
    TF_CONFIG is no JSON, has a malformed or repeated address, a job that is none of chief, worker,
    ps and evaluator, several chiefs, or a task that its cluster does not have.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
        *,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        self._environment = environment
        self._env = config.environment() if env is None else env

    def cluster_spec(self) -> ClusterSpec:
        """The cluster that TF_CONFIG describes now, evaluator included."""
        return self._read().cluster

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """The address of a task, this one by default.

        Returns:
            TF_CONFIG's `session_master` if it has one; else `""` for a cluster of at most one
            task; else as the other resolvers.

        Raises:
            RuntimeError: neither the arguments nor TF_CONFIG say which task.
        """
        read = self._read()
        if read.session_master is not None:
            return read.session_master
        if one_task(read.cluster):
            return ""
        if None in (
            read.task_type if task_type is None else task_type,
            read.task_id if task_id is None else task_id,
        ):
            raise RuntimeError(
                f'{_VARIABLE}["task"]: expected the type and index of this process, for its '
                f"cluster has several tasks. Got none. The whole looks like {_EXAMPLE}."
            )
        return super().master(task_type, task_id, rpc_layer)

    @property
    def environment(self) -> str | None:
        return self._environment

    @property
    def task_type(self) -> str | None:
        return self._read().task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        return self._read().task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        return self._read().rpc_layer if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    def _read(self) -> TFConfig:
        return parse(self._env.get(_VARIABLE), self._task_type, self._task_id)


def parse(
    text: str | None, task_type: str | None = None, task_id: int | str | None = None
) -> TFConfig:
    """Reads the text of TF_CONFIG; None and an empty one stand for `{}`.

    Args:
        text: JSON, as in `_EXAMPLE`.
        task_type: instead of `["task"]["type"]`.
        task_id: instead of `["task"]["index"]`.

    Raises:
        ValueError: all that is wrong with one part of it; see `TFConfigClusterResolver`.
    """
    fields = _load(text)
    task = _object(fields, "task")
    cluster = _cluster(_object(fields, "cluster"))
    type_field = f'{_VARIABLE}["task"]["type"]' if task_type is None else "task_type"
    id_field = f'{_VARIABLE}["task"]["index"]' if task_id is None else "task_id"
    task_type = _text(task, "type", type_field) if task_type is None else str(task_type)
    index = _index(task.get("index") if task_id is None else task_id, id_field)
    if cluster:
        names = {"type_field": type_field, "id_field": id_field}
        field = f'{_VARIABLE}["cluster"]'
        if faults := roles.faults(cluster, task_type, index, cluster_field=field, **names):
            raise ValueError("\n".join(faults))
        if local := loopback_tasks(cluster):
            warnings.warn(
                f"{field}: expected addresses that every machine can reach. Got "
                f"{'; '.join(local)}, which only that machine itself can, beside others. Give the "
                "name or IP by which the other machines know it.",
                stacklevel=_CALLER,
            )
    return TFConfig(
        cluster,
        task_type,
        index,
        _text(fields, "rpc_layer", f'{_VARIABLE}["rpc_layer"]'),
        _text(fields, "session_master", f'{_VARIABLE}["session_master"]'),
    )


def _load(text: str | None) -> dict[str, Any]:
    if text is None or not text.strip():
        return {}
    shown = repr(text if len(text) <= _SHOWN else text[:_SHOWN] + " ...")
    try:
        loaded = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{_VARIABLE}: expected JSON, such as {_EXAMPLE}. Got {shown}, which is broken at line "
            f"{error.lineno}, column {error.colno}: {error.msg}. Write it with json.dumps."
        ) from None
    if not isinstance(loaded, dict):
        raise ValueError(f"{_VARIABLE}: expected a JSON object, such as {_EXAMPLE}. Got {shown}.")
    return loaded


def _object(fields: dict[str, Any], key: str) -> dict[str, Any]:
    value = fields.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(
            f'{_VARIABLE}["{key}"]: expected a JSON object. Got {value!r}. The whole looks like '
            f"{_EXAMPLE}."
        )
    return value


def _cluster(jobs: dict[str, Any]) -> ClusterSpec:
    try:
        return ClusterSpec(jobs)
    except (TypeError, ValueError) as error:
        raise ValueError(f'{_VARIABLE}["cluster"]: {error}') from None


def _text(fields: dict[str, Any], key: str, field: str) -> str | None:
    value = fields.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{field}: expected a string. Got {value!r}.")
    return value


def _index(value: Any, field: str) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        return int(value)  # As some operators write it.
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError(f"{field}: expected a whole number, 0 for the first task. Got {value!r}.")
    return value
