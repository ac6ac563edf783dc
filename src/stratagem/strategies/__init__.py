"""One file a strategy; abstract.py first."""

from __future__ import annotations

from stratagem.strategies.abstract import Strategy as Strategy
from stratagem.strategies.central_storage import (
    CentralStorageStrategy as CentralStorageStrategy,
)
from stratagem.strategies.default import DefaultStrategy as DefaultStrategy
from stratagem.strategies.described import DescribedTPUStrategy as DescribedTPUStrategy
from stratagem.strategies.mirrored import MirroredStrategy as MirroredStrategy
from stratagem.strategies.multi_worker_mirrored import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from stratagem.strategies.one_device import OneDeviceStrategy as OneDeviceStrategy
from stratagem.strategies.parameter_server import (
    ParameterServerStrategy as ParameterServerStrategy,
)
from stratagem.strategies.planned import PlannedStrategy as PlannedStrategy
from stratagem.strategies.planned_servers import PlannedServers as PlannedServers
from stratagem.strategies.tpu import RunOptions as RunOptions
from stratagem.strategies.tpu import TPUStrategy as TPUStrategy
