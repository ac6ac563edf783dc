"""The coordinator of a parameter-server job: who computes what, when, and what is finished."""

from __future__ import annotations

from stratagem.coordinator import tasks as _tasks
from stratagem.coordinator.cluster_coordinator import ClusterCoordinator as ClusterCoordinator
from stratagem.coordinator.per_worker import (
    experimental_get_current_worker_index as experimental_get_current_worker_index,
)
from stratagem.coordinator.per_worker_values import PerWorkerValues as PerWorkerValues
from stratagem.coordinator.per_worker_variable import PerWorkerVariable as PerWorkerVariable
from stratagem.coordinator.remote_value import CancelledError as CancelledError
from stratagem.coordinator.remote_value import RemoteValue as RemoteValue

PerWorkerValue = PerWorkerValues

_tasks.install()
