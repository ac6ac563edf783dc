"""The names TensorFlow keeps under tf.tpu.experimental."""

from __future__ import annotations

from typing import Any

from stratagem.tpu.assignment import DeviceAssignment as DeviceAssignment
from stratagem.tpu.cores import find, topology_of
from stratagem.tpu.topology import Topology as Topology


def initialize_tpu_system(cluster_resolver: Any = None) -> Topology:
    """Finds the TPUs of the slice; starts the JAX backend. Called by every process.

    Unlike TensorFlow's, it wipes nothing: JAX starts the cores at first use, once a process.

    Args:
        cluster_resolver: a TPUClusterResolver; what it looked for stands in the error.

    Returns:
        Where the cores are.

    Raises:
        RuntimeError: this process has none; it says what was looked for, and how to rehearse.
    """
    return topology_of(find(cluster_resolver))


def shutdown_tpu_system(cluster_resolver: Any = None) -> None:
    """Checks that there are TPUs, and leaves them as they are. Called by every process.

    JAX keeps the cores until the process ends, and values on them stay; a job is left at the end.

    Raises:
        RuntimeError: there are no TPUs.
    """
    find(cluster_resolver)
