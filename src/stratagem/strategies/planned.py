"""A strategy of which only the number of replicas is real: for tracing steps, see `cli/plan.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stratagem.collectives import NcclAllReduce
from stratagem.data import InputOptions
from stratagem.step.primitives import AXIS
from stratagem.strategies.abstract import Strategy


class PlannedStrategy(Strategy):
    """Stands for any synchronous strategy of so many replicas, while a step is traced.

    Variables are on this machine's first device, batches stay on the host. What would run a step
    must not be reached: whoever makes this strategy stops its program when a step has been traced.

    Args:
        replicas: how many.
    """

    described = True

    def __init__(self, replicas: int):
        super().__init__([jax.local_devices()[0]] * replicas)

    def _lay_out(self, devices: Sequence[jax.Device]) -> None:
        """One replica on each of these, which may all be the same one, or be described alone."""
        self._devices = tuple(devices)
        self.cross_device_ops = NcclAllReduce()
        self.mesh = Mesh(np.asarray(self._devices), (AXIS,))
        self.local_replicas = range(len(self._devices))
        self._local_devices = self._devices
        self._one = len(self._devices) == 1
        self.spans = False
        self.home = NamedSharding(self.mesh, PartitionSpec())
        self._split = NamedSharding(self.mesh, PartitionSpec(AXIS))

    def describe(self, devices: Sequence[jax.Device]) -> None:
        """Takes these devices from now on, to be lowered for; as many as there are replicas."""
        self._lay_out(devices)

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """One name for all of them."""
        return (f"{len(self._devices)} planned replicas",)

    def place(self, value: Any) -> jax.Array:
        """Where JAX puts it on this machine."""
        return jnp.asarray(value)

    def place_stacked(self, stacked: Any) -> jax.Array:
        """Where JAX puts it on this machine."""
        return jnp.asarray(stacked)

    def refuse(self, what: str) -> None:
        """Lets everything come as far as its step."""

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """The parts stay on the host."""
        return super().experimental_distribute_dataset(dataset, _on_host(options))

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[Any], Any], options: Any = None
    ) -> Any:
        """The parts stay on the host."""
        return super().distribute_datasets_from_function(dataset_fn, _on_host(options))

    experimental_distribute_datasets_from_function = distribute_datasets_from_function


def _on_host(options: Any) -> InputOptions:
    options = InputOptions() if options is None else options
    return options._replace(experimental_fetch_to_device=False)
