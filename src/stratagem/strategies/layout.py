"""Where a strategy's values live, and what changes where several processes share them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from stratagem import config
from stratagem.collectives import CrossDeviceOps
from stratagem.data.placement import local_replicas
from stratagem.step.primitives import AXIS
from stratagem.values import PerReplica, as_array, unstack

T = TypeVar("T")


class Layout:
    """The devices of a strategy, one a replica, and the arrays on them. Mixed into Strategy alone.

    The methods from `place_first` on are what a strategy of several processes overrides: where
    they would communicate, one process has nothing to do.
    """

    job: Any = None  # the processes that train together, where there are several
    keeps_state = False  # True where a step may fail, and its inputs must survive it
    stands_for: Any = None  # the strategy whose steps this one compiles for other devices
    served = False  # True where variables live on parameter servers
    late_gradients = "keep"  # what happens to those that were computed with old variables
    central = False  # True where variables live once, on a device that need not be a replica's
    _ops: CrossDeviceOps

    def _lay_out(self, devices: Sequence[jax.Device]) -> None:
        """One replica on each of these devices from now on."""
        here = jax.process_index()
        config.ensure_safe_cpu_pool(d for d in devices if d.process_index == here)
        self._devices = tuple(devices)
        self.cross_device_ops = self._ops.placed_on(self._devices)
        self.mesh = Mesh(np.asarray(self._devices), (AXIS,))
        self.local_replicas = local_replicas(self.mesh)
        self._local_devices = tuple(self._devices[i] for i in self.local_replicas)
        self._one = len(self._devices) == 1
        self.spans = len(self._local_devices) < len(self._devices)  # several processes
        self.home = (  # where a mirrored variable lives
            SingleDeviceSharding(self._devices[0])
            if self._one
            else NamedSharding(self.mesh, PartitionSpec())
        )
        self._split = NamedSharding(self.mesh, PartitionSpec(AXIS))

    @property
    def layouts(self) -> tuple[Any, Any]:
        """The shardings of mirrored values, and of `[replicas, ...]`."""
        return self.home, self._split

    def place(self, value: Any) -> jax.Array:
        """Lays a value out where mirrored variables live: on every replica's device."""
        # Asked for every variable in every step of `fit`; device_put takes longer to find it out.
        if isinstance(value, jax.Array) and value.committed and value.sharding == self.home:
            return value
        value = self.local_view(canonical(value))
        if not self.spans:
            return jax.device_put(value, self.home)
        # All processes have it: they need not be asked, which `jax.device_put` would.
        parts = [jax.device_put(value, d) for d in self._local_devices]
        return jax.make_array_from_single_device_arrays(np.shape(value), self.home, parts)

    def place_stacked(self, stacked: Any) -> jax.Array:
        """Lays `[replicas, ...]` out with one row on each replica's device."""
        if isinstance(stacked, jax.Array) and stacked.sharding == self._split:
            return stacked
        if isinstance(stacked, jax.Array) and not stacked.is_fully_addressable:
            return self.place_local(np.stack(unstack(stacked)))  # of processes before
        if self.spans:
            return self.place_local(np.asarray(stacked)[self.local_replicas.start :])
        return jax.device_put(canonical(stacked), self._split)

    def place_components(self, variable: Any, held: jax.Array) -> jax.Array:
        """The components of an on-read variable on the replicas that there are now."""
        del variable
        return held

    def place_local(self, rows: Any) -> jax.Array:
        """Makes `[replicas, ...]` of the rows of this process's replicas. Every process calls it.

        Args:
            rows: `[local replicas, ...]` or more; those that follow are other processes'.
        """
        rows = canonical(rows)
        if not self.spans:
            return jax.device_put(rows, self._split)
        parts = [jax.device_put(rows[i][None], d) for i, d in enumerate(self._local_devices)]
        shape = (len(self._devices), *rows.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self._split, parts)

    def local_view(self, value: Any) -> Any:
        """A mirrored value as an array of this process alone, for computing outside of steps."""
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            return value.addressable_data(0)
        return value

    def place_first(self, value: Any) -> jax.Array:
        """`place` for a new variable: where processes disagree, the chief's value is taken."""
        return self.place(value)

    def current(self, value: Any) -> Any:
        """A part of a batch, dealt anew where the processes have changed since it was dealt."""
        return value

    def join_arguments(self, arguments: Any, shared: bool) -> Any:
        """What a call's arguments are in the whole job. One process knows them all.

        Args:
            arguments: structure of the arguments.
            shared: arrays are the same everywhere (in cross-replica functions); else they are
                each process's own.
        """
        del shared
        return arguments

    def whole(self, stacked: jax.Array) -> Any:
        """`[replicas, ...]` as an array of this process alone. Every process calls it."""
        return stacked

    def all_parts(self, value: PerReplica) -> Sequence[Any]:
        """The part of each replica of the job. Every process calls it."""
        return value.values

    def place_state(self, variable: Any, value: Any) -> jax.Array:
        """`place` for a variable's value that Keras keeps outside of the variable in `fit`."""
        del variable
        return self.place(value)

    def execute(self, function: Callable[..., T], *inputs: Any) -> T:
        """Runs a compiled program of this strategy."""
        return function(*inputs)

    def in_step(
        self,
        work: Callable[[], T],
        again: Callable[[T], None],
        doing: str,
        give: Callable[[], bytes] | None = None,
    ) -> T:
        """Does what every process does in the same order; see `cluster.lockstep.Lockstep.unit`."""
        del again, doing, give
        return work()

    def worker_parts(self, value: Any) -> PerReplica | None:
        """What a plain value is on each worker, where several have their own; else None."""
        del value
        return None


def canonical(value: Any) -> Any:
    """Python and NumPy values in the dtype that JAX keeps without x64."""
    return value if isinstance(value, jax.Array) else as_array(value)
