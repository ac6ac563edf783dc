"""Where the cores of a TPU slice are: `tf.tpu.experimental.Topology`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class Topology:
    """The mesh of cores of a slice, and which task drives which of them.

    Args:
        mesh_shape: `(x, y, z, cores on a chip)`.
        device_coordinates: `[tasks, cores of a task, 4]`, integers.

    Raises:
        ValueError: shapes or coordinates that do not fit; all of them are named.
    """

    def __init__(self, mesh_shape: Sequence[int] | np.ndarray, device_coordinates: Any):
        self.mesh_shape = np.asarray(mesh_shape, np.int32)
        self.device_coordinates = np.asarray(device_coordinates, np.int32)
        rank = self.mesh_shape.size
        if self.mesh_shape.ndim != 1 or rank != 4 or (self.mesh_shape < 1).any():
            raise ValueError(
                "mesh_shape: expected four positive integers, (x, y, z, cores on a chip). Got "
                f"{self.mesh_shape.tolist()}."
            )
        shape = self.device_coordinates.shape
        if len(shape) != 3 or shape[2] != rank:
            raise ValueError(
                "device_coordinates: expected the shape [tasks, cores of a task, 4]. Got "
                f"{list(shape)}."
            )
        flat = [tuple(c) for c in self.device_coordinates.reshape(-1, rank).tolist()]
        outside = sorted({c for c in flat if not self._within(c)})
        repeated = sorted({c for c in flat if flat.count(c) > 1})
        if outside or repeated:
            raise ValueError(
                f"device_coordinates: expected each core once, within the mesh "
                f"{self.mesh_shape.tolist()}. Got outside it: {outside}; several times: {repeated}."
            )
        self._task_and_core = {
            tuple(c): (task, core)
            for task, cores in enumerate(self.device_coordinates.tolist())
            for core, c in enumerate(cores)
        }

    def _within(self, coordinates: Sequence[int]) -> bool:
        return all(0 <= c < n for c, n in zip(coordinates, self.mesh_shape, strict=True))

    @property
    def mesh_rank(self) -> int:
        """Four."""
        return int(self.mesh_shape.size)

    @property
    def num_tasks(self) -> int:
        """How many tasks drive cores."""
        return self.device_coordinates.shape[0]

    @property
    def num_tpus_per_task(self) -> int:
        """How many cores each task drives."""
        return self.device_coordinates.shape[1]

    @property
    def missing_devices(self) -> np.ndarray:
        """Coordinates of the mesh at which no task has a core, `[missing, 4]`."""
        everywhere = np.ndindex(*self.mesh_shape.tolist())
        missing = [c for c in everywhere if c not in self._task_and_core]
        return np.asarray(missing, np.int32).reshape(-1, self.mesh_rank)

    def task_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """The task that drives the core at some coordinates; ValueError where there is none."""
        return self._at(device_coordinates)[0]

    def tpu_device_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """The core's index among its task's; ValueError where there is none."""
        return self._at(device_coordinates)[1]

    def _at(self, coordinates: Sequence[int]) -> tuple[int, int]:
        key = tuple(int(c) for c in coordinates)
        if key not in self._task_and_core:
            raise ValueError(
                f"Expected the coordinates of a core, one of {sorted(self._task_and_core)}. Got "
                f"{key}."
            )
        return self._task_and_core[key]
