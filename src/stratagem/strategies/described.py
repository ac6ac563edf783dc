"""TPUStrategy for chips that are not here: its steps are lowered, to be compiled, and never run.

The compiler for TPUs, the package libtpu, needs no TPU. So a step can be compiled on any machine,
and asked for its memory, its operations and its collectives before the chips are rented:

    strategy = stratagem.experimental.DescribedTPUStrategy("v5e:4x4")
    with strategy.scope():
        model = build()
    compiled = strategy.lower(model.train_step, (batch,)).compile()
    print(compiled.memory_analysis(), compiled.cost_analysis())

Start such a program with JAX_PLATFORMS=cpu; see libtpu_stacks.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from stratagem.cluster import TPUClusterResolver
from stratagem.strategies import libtpu_stacks
from stratagem.strategies.tpu import TPUStrategy


class DescribedTPUStrategy(TPUStrategy):
    """A TPUStrategy on all cores of a slice that is only described, of one machine or of many.

    Variables hold their values in the host's memory. `lower` gives the program that `run` and
    `fit` would run on such a slice; what would run it raises an error.

    Args:
        topology: generation and shape of the slice in chips, such as `"v5e:4x4"`, `"v5p:2x2x2"` or
            `"v6e:2x4"`.

    Raises:
        ImportError: libtpu is not installed.
        ValueError: libtpu knows no such slice.
    """

    described = True

    def __init__(self, topology: str):
        self.topology = topology
        super().__init__(TPUClusterResolver("local"))
        self.spans = False  # no other process runs either

    def _find_devices(self) -> list[jax.Device]:
        return describe_slice(self.topology)

    def place(self, value: Any) -> jax.Array:
        """Where JAX puts it on this machine."""
        return jnp.asarray(value)

    def place_stacked(self, stacked: Any) -> jax.Array:
        """Where JAX puts it on this machine."""
        return jnp.asarray(stacked)

    def refuse(self, what: str) -> NoReturn:
        """Raises the error that says that nothing can run here."""
        raise RuntimeError(
            f"{what}: expected a strategy whose devices are here. Got {self!r}, which only "
            f"describes a slice {self.topology}. Use lower(...).compile() with it; or run with "
            "stratagem.TPUStrategy."
        )

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> NoReturn:
        """Raises RuntimeError: there is no device to run on."""
        self.refuse("run")

    def call_function(self, fn: Any, args: Any, kwargs: Any) -> NoReturn:
        """Raises RuntimeError: there is no device to run on."""
        self.refuse("stratagem.function")

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> NoReturn:
        """Raises RuntimeError: there is no device to put the rows on."""
        self.refuse("experimental_distribute_dataset")

    def distribute_datasets_from_function(self, dataset_fn: Any, options: Any = None) -> NoReturn:
        """Raises RuntimeError: there is no device to put the rows on."""
        self.refuse("distribute_datasets_from_function")

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} of {self.topology}, {self.num_replicas_in_sync} replicas, "
            f"made at {self._made_at}>"
        )


def describe_slice(topology: str) -> list[jax.Device]:
    """The cores of a slice, such as `"v5e:4x4"`, each machine's together.

    Raises:
        ImportError: libtpu is not installed.
        RuntimeError: another process has it.
        ValueError: libtpu knows no such slice.
    """
    libtpu_stacks.fit()
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except RuntimeError as error:
        if "not installed" in str(error):
            raise ImportError(
                "DescribedTPUStrategy: expected the package libtpu, the compiler for TPUs. Got "
                f"{error}. Run pip install 'jax[tpu]'; no TPU is needed."
            ) from error
        if "lockfile" in str(error):
            raise RuntimeError(
                "DescribedTPUStrategy: expected libtpu for this process alone. Got a lock that "
                f"another one holds: {error}. Wait for its end; or, where none of both uses TPUs, "
                "set ALLOW_MULTIPLE_LIBTPU_LOAD=1."
            ) from error
        raise ValueError(
            f"topology: expected a slice that libtpu knows, such as 'v5e:4x4', 'v5p:2x2x2' or "
            f"'v6e:2x4'. Got {topology!r}: {error}"
        ) from error
    # As in a job: the cores of a machine together.
    return sorted(devices, key=lambda device: (device.process_index, device.id))
