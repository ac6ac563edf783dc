"""Names that TensorFlow keeps under tf.distribute.experimental."""

from __future__ import annotations

from stratagem import strategies
from stratagem.cluster import TPUClusterResolver
from stratagem.data import ValueContext as ValueContext
from stratagem.recovery.preemption import (
    PreemptionCheckpointHandler as PreemptionCheckpointHandler,
)
from stratagem.recovery.preemption import PreemptionWatcher as PreemptionWatcher
from stratagem.recovery.preemption import TerminationConfig as TerminationConfig
from stratagem.strategies import DescribedTPUStrategy as DescribedTPUStrategy
from stratagem.tpu.experimental import DeviceAssignment


class TPUStrategy(strategies.TPUStrategy):
    """`stratagem.TPUStrategy` with the argument names of TensorFlow's first version of it."""

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        device_assignment: DeviceAssignment | None = None,
    ):
        super().__init__(tpu_cluster_resolver, device_assignment)
