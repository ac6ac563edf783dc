"""Which cores a replica computes on: `tf.tpu.experimental.DeviceAssignment`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from stratagem.tpu.topology import Topology


class DeviceAssignment:
    """The cores of each replica, in the order of its logical devices.

    Args:
        topology: where the cores are.
        core_assignment: `[replicas, cores of a replica, 4]`, coordinates in the topology.

    Raises:
        ValueError: another shape, coordinates without a core, or a core of two replicas.
    """

    def __init__(self, topology: Topology, core_assignment: np.ndarray):
        self.topology = topology
        self.core_assignment = np.asarray(core_assignment, np.int32)
        shape = self.core_assignment.shape
        if len(shape) != 3 or shape[2] != topology.mesh_rank or 0 in shape:
            raise ValueError(
                "core_assignment: expected the shape [replicas, cores of a replica, "
                f"{topology.mesh_rank}], with at least one of each. Got {list(shape)}."
            )
        flat = [tuple(c) for c in self.core_assignment.reshape(-1, shape[2]).tolist()]
        for core in flat:
            topology.task_ordinal_at_coordinates(core)  # raises where there is none
        if repeated := sorted({c for c in flat if flat.count(c) > 1}):
            raise ValueError(
                f"core_assignment: expected each core once. Got several times: {repeated}."
            )

    @classmethod
    def build(
        cls,
        topology: Topology,
        computation_shape: Sequence[int] | None = None,
        computation_stride: Sequence[int] | None = None,
        num_replicas: int = 1,
    ) -> DeviceAssignment:
        """Cuts the mesh into blocks of one shape, a replica each; x counts fastest.

        Args:
            topology: where the cores are.
            computation_shape: of a block, `(x, y, z, cores on a chip)`; None for one core.
            computation_stride: distance of a block's cores from each other along each axis; None
                for neighbours.
            num_replicas: how many blocks to take.

        Raises:
            ValueError: shape or stride are no four positive integers, or there are fewer blocks.
        """
        shape = _four(computation_shape, "computation_shape", topology)
        stride = _four(computation_stride, "computation_stride", topology)
        reach = shape * stride
        blocks = topology.mesh_shape // reach
        available = math.prod(blocks.tolist()) * math.prod(stride.tolist())
        if not 1 <= num_replicas <= available:
            raise ValueError(
                f"num_replicas: expected between 1 and {available}, since a mesh of "
                f"{topology.mesh_shape.tolist()} has {available} blocks of "
                f"{shape.tolist()} with stride {stride.tolist()}. Got {num_replicas}."
            )
        within = np.asarray([_x_first(i, shape) for i in range(math.prod(shape.tolist()))])
        starts = [
            _x_first(i // math.prod(stride.tolist()), blocks) * reach
            + _x_first(i % math.prod(stride.tolist()), stride)
            for i in range(num_replicas)
        ]
        return cls(topology, np.stack([start + within * stride for start in starts]))

    @property
    def num_replicas(self) -> int:
        """How many replicas there are."""
        return self.core_assignment.shape[0]

    @property
    def num_cores_per_replica(self) -> int:
        """How many logical devices a replica has."""
        return self.core_assignment.shape[1]

    def coordinates(self, replica: int, logical_core: int) -> tuple[int, ...]:
        """Where a logical device of a replica is."""
        return tuple(self.core_assignment[replica, logical_core].tolist())

    def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
        """A logical device's index among the cores of its task."""
        at = self.coordinates(replica, logical_core)
        return self.topology.tpu_device_ordinal_at_coordinates(at)

    def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
        """The replicas whose logical device of that number a task drives."""
        return [
            replica
            for replica in range(self.num_replicas)
            if task_id
            == self.topology.task_ordinal_at_coordinates(self.coordinates(replica, logical_core))
        ]


def _four(given: Sequence[int] | None, name: str, topology: Topology) -> np.ndarray:
    if given is None:
        return np.ones(topology.mesh_rank, np.int32)
    array = np.asarray(given)
    if array.shape != (topology.mesh_rank,) or array.dtype.kind not in "iu" or (array < 1).any():
        raise ValueError(
            f"{name}: expected {topology.mesh_rank} positive integers, (x, y, z, cores on a chip). "
            f"Got {given!r}."
        )
    return array.astype(np.int32)


def _x_first(number: int, shape: np.ndarray) -> np.ndarray:
    """The place of a number in a box that is counted along its first axis first."""
    return np.asarray(np.unravel_index(number, shape.tolist(), order="F"), np.int32)
