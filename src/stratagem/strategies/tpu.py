"""TPUStrategy: a copy of each variable on every TPU core, kept equal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from stratagem.cluster import TPUClusterResolver
from stratagem.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from stratagem.tpu.assignment import DeviceAssignment
from stratagem.tpu.cores import coordinates, find


class RunOptions(NamedTuple):
    """What `run(fn, options=...)` takes in TF; here nothing changes by it.

    Attributes:
        experimental_enable_dynamic_batch_size: parts of any shapes run in any case.
        experimental_bucketizing_dynamic_shape: likewise.
        experimental_xla_options: a `tpu.XLAOptions`, likewise.
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None


class TPUStrategy(MultiWorkerMirroredStrategy):
    """Synchronous training on the TPU cores of a slice, one replica on each.

    Each core must hold the whole model. Gradients, metrics and statistics of a step travel in one
    all-reduce over the links between the chips. A slice of several machines is a job of as many
    processes, each of which runs the same program, as under MultiWorkerMirroredStrategy.

    Args:
        tpu_cluster_resolver: a TPUClusterResolver; None makes one from the environment.
        experimental_device_assignment: the core of each replica; None takes all cores in the
            order of JAX. It may leave cores out.
        experimental_spmd_xla_partitioning: accepted for TF's sake: with one core a replica there
            is nothing to partition.

    Raises:
        RuntimeError: there are no TPUs; the error says how to rehearse.
        TypeError: an argument has another class.
        ValueError: the assignment names a core that there is not, or leaves a machine without one.
        NotImplementedError: several cores a replica.
        PeerTimeoutError: machines of the slice are missing; names them and their addresses.
    """

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        experimental_device_assignment: DeviceAssignment | None = None,
        experimental_spmd_xla_partitioning: bool = False,
    ):
        del experimental_spmd_xla_partitioning
        resolver = TPUClusterResolver() if tpu_cluster_resolver is None else tpu_cluster_resolver
        if not isinstance(resolver, TPUClusterResolver):
            raise TypeError(
                "tpu_cluster_resolver: expected a TPUClusterResolver. Got "
                f"{resolver!r}. Write TPUClusterResolver(tpu=address)."
            )
        self._slice = resolver
        self._assignment = experimental_device_assignment
        super().__init__(resolver.workers())

    def _find_devices(self) -> list[jax.Device]:
        return _assigned(find(self._slice), self._assignment)

    @property
    def cluster_resolver(self) -> TPUClusterResolver:
        """What knows the slice: the resolver that was given, or was made from the environment."""
        return self._slice

    def experimental_assign_to_logical_device(self, tensor: Any, logical_device_id: int) -> Any:
        """Says which of a replica's cores computes a tensor. A replica has one core here.

        Returns:
            The tensor.

        Raises:
            ValueError: the replica has no such logical device.
        """
        if logical_device_id != 0:
            raise ValueError(
                "logical_device_id: expected 0, the one logical device of a replica. Got "
                f"{logical_device_id!r}. {_ONE_CORE}"
            )
        return tensor

    def experimental_split_to_logical_devices(
        self, tensor: Any, partition_dimensions: Sequence[int]
    ) -> Any:
        """Splits a tensor over a replica's cores. A replica has one core here.

        Args:
            tensor: of any shape.
            partition_dimensions: into how many parts each of its axes is split.

        Returns:
            The tensor.

        Raises:
            ValueError: not one number for each axis, or their product is not 1.
        """
        shape, parts = tuple(np.shape(tensor)), list(partition_dimensions)
        if len(parts) != len(shape):
            raise ValueError(
                f"partition_dimensions: expected one number for each of the {len(shape)} axes of a "
                f"tensor of shape {shape}. Got {parts}."
            )
        if math.prod(parts) != 1 or min(parts, default=1) < 1:
            raise ValueError(
                "partition_dimensions: expected a product of 1, the logical devices of a replica. "
                f"Got {parts}. {_ONE_CORE}"
            )
        return tensor

    def experimental_replicate_to_logical_devices(self, tensor: Any) -> Any:
        """Copies a tensor to all of a replica's cores, of which there is one here: the tensor."""
        return tensor


_ONE_CORE = (
    "TPUStrategy runs one core a replica, so that the whole model must fit one core; it does not "
    "split a model. Take this call out, or split the model with keras.distribution.ModelParallel, "
    "without a strategy."
)


def _assigned(cores: list[jax.Device], assignment: DeviceAssignment | None) -> list[jax.Device]:
    """The core of each replica."""
    if assignment is None:
        return cores
    if not isinstance(assignment, DeviceAssignment):
        raise TypeError(
            "experimental_device_assignment: expected a DeviceAssignment. Got "
            f"{assignment!r}. Make one with stratagem.tpu.experimental.DeviceAssignment.build("
            "topology, num_replicas=...), of the topology that initialize_tpu_system returns."
        )
    if assignment.num_cores_per_replica > 1:
        raise NotImplementedError(
            "experimental_device_assignment: expected one core a replica. Got "
            f"{assignment.num_cores_per_replica}. {_ONE_CORE}"
        )
    at = {coordinates(core, i): core for i, core in enumerate(cores)}
    wanted = [assignment.coordinates(replica, 0) for replica in range(assignment.num_replicas)]
    if missing := [where for where in wanted if where not in at]:
        raise ValueError(
            f"experimental_device_assignment: expected cores of this slice, {sorted(at)}. Got "
            f"{missing} as well. Build it with the topology that initialize_tpu_system returns."
        )
    chosen = [at[where] for where in wanted]
    machines = {core.process_index for core in cores} - {core.process_index for core in chosen}
    if machines:
        raise ValueError(
            "experimental_device_assignment: expected a core of every machine of the slice, since "
            f"each runs the program. Got none of machines {sorted(machines)}. Take more replicas, "
            "or a smaller slice."
        )
    return sorted(chosen, key=lambda core: core.process_index)  # a machine's replicas together
