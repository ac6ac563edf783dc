"""The TPU cores of this process, or virtual devices in their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from stratagem import config
from stratagem.tpu.topology import Topology

_REHEARSED_CORES = 8  # of a v2-8 or v3-8, where most scripts for TPUs were written


def find(resolver: Any = None) -> list[jax.Device]:
    """The cores of the slice, each machine's together, in JAX's order; starts the JAX backend.

    Args:
        resolver: a TPUClusterResolver or None; it knows what the environment says.

    Raises:
        RuntimeError: this process has none.
    """
    cores = config.devices_of("tpu")
    if not cores:
        told = "" if resolver is None else f" The cluster resolver found: {resolver.found}."
        raise RuntimeError(
            "Expected TPUs in this process. Got "
            f"{', '.join(config.list_devices())}. Looked for devices of JAX's platform 'tpu', for "
            f"which the package libtpu must be installed (pip install 'jax[tpu]').{told} JAX "
            "drives the TPUs of the machine that the program runs on: start it there. To rehearse "
            "on virtual CPU devices without an edit, start the program with "
            f"{config.how_to_rehearse('tpu', _REHEARSED_CORES)} in its environment."
        )
    if jax.process_count() == 1:
        return cores
    everywhere = [core for core in jax.devices() if core.platform == cores[0].platform]
    return sorted(everywhere, key=lambda core: (core.process_index, core.id))


def coordinates(core: jax.Device, index: int) -> tuple[int, ...]:
    """`(x, y, z, core on chip)`; a virtual device stands at its index along x."""
    where = getattr(core, "coords", None)
    if where is None:
        return (index, 0, 0, 0)
    return (*where, core.core_on_chip)


def topology_of(cores: Sequence[jax.Device]) -> Topology:
    """Where the cores of a slice are, of which each machine has as many."""
    machines = len({core.process_index for core in cores})
    found = np.asarray([coordinates(core, i) for i, core in enumerate(cores)])
    by_machine = found.reshape(machines, -1, found.shape[1])
    return Topology(mesh_shape=found.max(axis=0) + 1, device_coordinates=by_machine)
