"""The cluster as Amazon SageMaker describes it to its training containers."""

from __future__ import annotations

import json
from collections.abc import Mapping

from stratagem import config
from stratagem.cluster.abstract import ClusterResolver
from stratagem.cluster.spec import ClusterSpec, one_task

_CURRENT_HOST = "SM_CURRENT_HOST"
_HOSTS = "SM_HOSTS"
_JOB = "worker"


class SageMakerClusterResolver(ClusterResolver):
    """A resolver that reads the hosts of a SageMaker job, each of them a worker.

    The variables are read at every access.

    Args:
        port: the port that every worker listens on.
        task_type: the job of this process, instead of `"worker"`.
        task_id: the index of this process, instead of its host's place among the sorted hosts.
        rpc_layer: the protocol that `master` puts in front of an address.
        environment: what `environment` gives.
        env: the environment variables; None for those of this process.

    Every access raises RuntimeError where the variables are missing, and ValueError where they are
    malformed or do not have this host among the hosts.
    """

    def __init__(
        self,
        port: int = 2223,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
        *,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._port = port
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        self._environment = environment
        self._env = config.environment() if env is None else env

    def cluster_spec(self) -> ClusterSpec:
        """A worker for each host; empty if SM_HOSTS is."""
        hosts, _ = self._read()
        return ClusterSpec({_JOB: [f"{host}:{self._port}" for host in hosts]} if hosts else {})

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """The address of a task, this one by default; `""` for a cluster of at most one."""
        if one_task(self.cluster_spec()):
            return ""
        return super().master(task_type, task_id, rpc_layer)

    @property
    def environment(self) -> str | None:
        return self._environment

    @property
    def task_type(self) -> str | None:
        if self._task_type is not None:
            return self._task_type
        return _JOB if self._read()[0] else None

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        if self._task_id is not None:
            return self._task_id
        hosts, own = self._read()
        return hosts.index(own) if hosts else None

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    def _read(self) -> tuple[list[str], str]:
        """All hosts, sorted as on every host, and this one."""
        if missing := [name for name in (_CURRENT_HOST, _HOSTS) if name not in self._env]:
            raise RuntimeError(
                f"Not a SageMaker environment: expected {_CURRENT_HOST} and {_HOSTS}. Got no "
                f"{' and no '.join(missing)}. Start the program with SageMaker's training toolkit, "
                "or use TFConfigClusterResolver."
            )
        own, text = self._env[_CURRENT_HOST], self._env[_HOSTS]
        if not text.strip():
            return [], own
        try:
            hosts = json.loads(text)
        except json.JSONDecodeError:
            hosts = None
        if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
            raise ValueError(
                f'{_HOSTS}: expected a JSON list of host names, such as ["algo-1", "algo-2"]. Got '
                f"{text!r}."
            )
        if hosts and own not in hosts:
            raise ValueError(
                f"{_CURRENT_HOST}: expected one of the hosts in {_HOSTS}, {sorted(hosts)}. Got "
                f"{own!r}. SageMaker sets both; do not set one of them."
            )
        return sorted(hosts), own
