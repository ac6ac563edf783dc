"""Names that TensorFlow keeps under tf.distribute.experimental."""

from __future__ import annotations

from stratagem import coordinator as coordinator
from stratagem import strategies
from stratagem.cluster import ClusterResolver, TPUClusterResolver
from stratagem.collectives import CommunicationImplementation as CommunicationImplementation
from stratagem.collectives import CommunicationOptions as CommunicationOptions
from stratagem.collectives.options import collective_hints
from stratagem.coordinator import rpc as rpc
from stratagem.data import ValueContext as ValueContext
from stratagem.parameter_server import partitioners as partitioners
from stratagem.recovery.preemption import (
    PreemptionCheckpointHandler as PreemptionCheckpointHandler,
)
from stratagem.recovery.preemption import PreemptionWatcher as PreemptionWatcher
from stratagem.recovery.preemption import TerminationConfig as TerminationConfig
from stratagem.strategies import CentralStorageStrategy as CentralStorageStrategy
from stratagem.strategies import DescribedTPUStrategy as DescribedTPUStrategy
from stratagem.strategies import ParameterServerStrategy as ParameterServerStrategy
from stratagem.tpu.experimental import DeviceAssignment

CollectiveCommunication = CommunicationImplementation
CollectiveHints = collective_hints


class MultiWorkerMirroredStrategy(strategies.MultiWorkerMirroredStrategy):
    """`stratagem.MultiWorkerMirroredStrategy` with the arguments of TensorFlow's first version."""

    def __init__(
        self,
        communication: CommunicationImplementation = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
    ):
        super().__init__(cluster_resolver, CommunicationOptions(implementation=communication))


class TPUStrategy(strategies.TPUStrategy):
    """`stratagem.TPUStrategy` with the argument names of TensorFlow's first version of it."""

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        device_assignment: DeviceAssignment | None = None,
    ):
        super().__init__(tpu_cluster_resolver, device_assignment)
