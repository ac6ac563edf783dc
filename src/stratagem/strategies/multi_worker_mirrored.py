"""MultiWorkerMirroredStrategy: a copy of each variable on every device of every process."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from stratagem import config, context, variables
from stratagem.cluster import runtime
from stratagem.cluster.abstract import ClusterResolver
from stratagem.cluster.lockstep import Lockstep
from stratagem.cluster.tf_config import TFConfigClusterResolver
from stratagem.collectives.options import CommunicationOptions
from stratagem.errors import GroupChangedError, JobMismatchError, UnevenShapesError
from stratagem.step.execute import Executor
from stratagem.step.replica import ReplicaContext
from stratagem.strategies.abstract import Strategy
from stratagem.strategies.reductions import dense
from stratagem.strategies.sharing import share
from stratagem.values import PerReplica, cut, map_leaves, padded, unstack

_log = logging.getLogger("stratagem")
_ARRAYS = (jax.Array, np.ndarray, np.generic)

T = TypeVar("T")


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training on the devices of several processes, usually on several machines.

    Every process runs the same program, with its own TF_CONFIG; `stratagem run` starts them. Each
    device must hold the whole model. Without a cluster, or with one of one task, it trains on the
    devices of this process.

    Every process must make the same calls in the same order: `run`, `reduce`, `gather`, creating
    variables, reading metrics. Values that `run` returns are this process's; `reduce` and `gather`
    are over all. An array that is no distributed value is each process's own.

    Create it before anything uses JAX: it decides which devices there are.

    Args:
        cluster_resolver: knows the cluster and this task; None reads TF_CONFIG.
        communication_options: how the processes communicate.

    Raises:
        RuntimeError: JAX has started.
        PeerTimeoutError: tasks are missing; names them and their addresses.
        JobMismatchError: tasks have other clusters, versions or devices.
        ValueError: the cluster is wrong.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
    ):
        options = CommunicationOptions.checked(communication_options)
        resolver = TFConfigClusterResolver() if cluster_resolver is None else cluster_resolver
        _check_resolver(resolver)
        self._resolver = resolver
        self.job = runtime.join(resolver, options.start_seconds, options.step_seconds)
        self.communication_options = options
        config.resolve_devices(None)  # checks the pool
        if self.job is not None:
            runtime.check_devices(self.job)
            self.keeps_state = self.job.may_change
            self.job.lockstep = Lockstep(
                self.job, self._rebuild, lambda data, source: share(self, data, source)
            )
        self._replaced: dict[int, tuple[Any, Any]] = {}
        self._doing = "a reduce"  # outside of what has a name
        self._warned: set[int] = set()  # variables that lost components at the latest change
        self._datasets: list[weakref.ref[Any]] = []
        super().__init__(self._find_devices(), options.cross_device_ops())

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """What knows the cluster and this task."""
        return self._resolver

    def _find_devices(self) -> list[jax.Device]:
        """The devices of all replicas, each process's own together."""
        return _all_devices()

    def place_first(self, value: Any) -> jax.Array:
        """Lays out a new variable's value; where processes disagree, the chief's is taken.

        Every process calls it: each creates the same variables in the same order.
        """
        if self.job is None:
            return self.place(value)
        return self.place(self.job.together(lambda: self._agreed(np.asarray(value))))

    def _agreed(self, array: np.ndarray) -> np.ndarray:
        mine = f"{array.dtype}{array.shape}".encode() + hashlib.sha256(array.tobytes()).digest()
        stream = self.job.channel.stream("variables")
        found = stream.all_gather(mine, "a new variable's initial value")
        if any(one != found[0] for one in found):
            return self._from_chief(array, found)
        return array

    def _from_chief(self, array: np.ndarray, found: Sequence[bytes]) -> np.ndarray:
        names = self.job.channel.names
        described = [one[:-32].decode() for one in found]
        if len(set(described)) > 1:
            raise JobMismatchError(
                "Expected every process to create the same variables in the same order. Got "
                + ", ".join(f"{n}: {d}" for n, d in zip(names, described, strict=True))
                + " at once. Make the model with the same program and settings on every worker."
            )
        stream = self.job.channel.stream("variables")
        received = stream.from_first(array.tobytes(), "the chief's initial value")
        return np.frombuffer(received, array.dtype).reshape(array.shape)

    def smaller(self) -> MultiWorkerMirroredStrategy | None:
        """This strategy with one process less, to compile for; None where it may not be so.

        It has the devices of all processes but the last: whoever is lost, those that are left get
        the numbers of these.
        """
        if self.job is None or not self.job.may_shrink:
            return None
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.stands_for, other.job, other.described = self, None, True
        last = self.job.size - 1
        other._lay_out([d for d in self._devices if d.process_index != last])
        other._run = Executor(other, ReplicaContext(other))
        return other

    def execute(self, function: Callable[..., T], *inputs: Any) -> T:
        """Runs a compiled program that may wait for other processes."""
        if self.job is None:
            return function(*inputs)
        return self.job.run(lambda: function(*inputs), self._doing)

    def in_step(
        self,
        work: Callable[[], T],
        again: Callable[[T], None],
        doing: str,
        give: Callable[[], bytes] | None = None,
    ) -> T:
        """Does what every process does in the same order, again where processes are lost."""
        if self.job is None or self.job.lockstep is None:
            return work()
        before, self._doing = self._doing, doing
        try:
            result = self.job.lockstep.unit(work, again, give)
        finally:
            self._doing = before
        if self._replaced:  # who goes on from here has the newer values
            self._replaced = {}
        return result

    def place_state(self, variable: Any, value: Any) -> jax.Array:
        """`place`, and the newer value for one that was computed with processes now lost."""
        replaced = self._replaced.get(id(variable))
        if replaced is not None and self._same(value, replaced[0]):
            value = replaced[1]
        return self.place(value)

    def place_components(self, variable: Any, held: jax.Array) -> jax.Array:
        """Components on the replicas that there are now; says where those of others are lost."""
        if self.job is None or held.sharding == self._split:
            return held
        placed = self.place_local(np.stack([np.asarray(part) for part in unstack(held)]))
        if held.shape[0] > placed.shape[0] and id(variable) not in self._warned:
            self._warned.add(id(variable))
            _log.warning(
                "Variable %s keeps a component on each replica until it is read: those of the "
                "lost processes are lost. (Its value after a change is that of the others.)",
                variables.describe(variable),
            )
        return placed

    def replace_state(self, variable: Any, old: Any, new: Any) -> None:
        """Takes the value of a step that was done again for the value that it gave before."""
        self._replaced[id(variable)] = (old, new)
        if variable._value is not None and self._same(variable._value, old):
            variable._value = new

    def _same(self, one: Any, other: Any) -> bool:
        one, other = np.asarray(self.local_view(one)), np.asarray(self.local_view(other))
        return one.tobytes() == other.tobytes()

    def _rebuild(self) -> None:
        runtime.check_devices(self.job)
        self._lay_out(self._find_devices())
        self._warned = set()
        self._datasets = [made for made in self._datasets if made() is not None]
        for dataset in filter(None, [made() for made in self._datasets]):
            try:
                dataset.follow(self.mesh, self.job)
            except GroupChangedError as error:
                self.job.member.give_up(str(error))

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Splits each global batch of a dataset among the replicas. See stratagem.data."""
        return self._noted(super().experimental_distribute_dataset(dataset, options))

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[Any], Any], options: Any = None
    ) -> Any:
        """Deals the per-replica batches of `dataset_fn(InputContext)` to the replicas."""
        return self._noted(super().distribute_datasets_from_function(dataset_fn, options))

    def _noted(self, dataset: Any) -> Any:
        if self.keeps_state:
            self._datasets.append(weakref.ref(dataset))
        return dataset

    def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:
        """As `Strategy`. Every process calls it, outside of steps too."""
        if self.job is None or context.current().trace is not None:
            return super().reduce(reduce_op, value, axis)
        reduce = super().reduce
        return self.job.together(lambda: reduce(reduce_op, self._left(value), axis))

    def gather(self, value: Any, axis: int) -> Any:
        """As `Strategy`. Every process calls it, outside of steps too."""
        if self.job is None or context.current().trace is not None:
            return super().gather(value, axis)
        gather = super().gather
        return self.job.together(lambda: gather(self._left(value), axis))

    def _left(self, value: Any) -> Any:
        """A value of processes before a change, as what is left of it: the parts that are here."""

        def left(leaf: Any) -> Any:
            stacked = getattr(leaf, "stacked", None)
            if not isinstance(leaf, PerReplica) or leaf.num_replicas == len(self.local_replicas):
                return leaf
            if stacked is None and leaf.num_replicas == self.num_replicas_in_sync:
                return leaf
            if stacked is not None and stacked.sharding == self.layouts[1]:
                return leaf
            _log.warning(
                "A value of %d replicas, from before the processes changed, is combined from the "
                "parts of those that are left: the lost ones' parts are missing in it.",
                leaf.num_replicas,
            )
            return PerReplica([np.asarray(part) for part in leaf.values])

        return map_leaves(left, value)

    def current(self, value: Any) -> Any:
        """A part of a batch, dealt anew where the processes have changed since it was dealt."""
        dealt = getattr(value, "dealt", None)
        return value if dealt is None or dealt.mesh is self.mesh else dealt.anew(self.mesh)

    def join_arguments(self, arguments: Any, shared: bool) -> Any:
        """Arrays become each process's own; the shapes of the others' parts are asked for."""
        if self.job is None:
            return arguments
        arguments = map_leaves(self.current, arguments)
        unknown: list[PerReplica] = []

        def note(leaf: Any) -> Any:
            if isinstance(leaf, PerReplica) and leaf.num_replicas < self.num_replicas_in_sync:
                unknown.append(leaf)
            return leaf

        map_leaves(note, arguments)
        shapes = iter(self._shapes(unknown)) if unknown else iter(())

        def join(leaf: Any) -> Any:
            if isinstance(leaf, PerReplica):
                if leaf.num_replicas < self.num_replicas_in_sync:
                    return PerReplica(leaf.values, next(shapes))
                return leaf
            if isinstance(leaf, _ARRAYS) and not shared:
                own = self.local_view(leaf)
                count = self.num_replicas_in_sync
                return PerReplica([own] * len(self.local_replicas), [np.shape(own)] * count)
            return leaf

        return map_leaves(join, arguments)

    def _shapes(self, values: Sequence[PerReplica]) -> list[list[tuple[int, ...]]]:
        """For each value, the shapes of its parts on all replicas."""
        own = [[list(np.shape(part)) for part in value.values] for value in values]
        stream = self.job.channel.stream("shapes")
        found = stream.all_gather(json.dumps(own).encode(), "the shapes of PerReplica values")
        workers = [json.loads(text) for text in found]
        if len({len(w) for w in workers}) > 1:
            raise JobMismatchError(
                "Expected the same PerReplica arguments on every process. Got "
                + ", ".join(
                    f"{name}: {len(w)}"
                    for name, w in zip(self.job.channel.names, workers, strict=True)
                )
                + ". Call run with the same arguments everywhere."
            )
        return [
            [tuple(shape) for worker in workers for shape in worker[i]] for i in range(len(values))
        ]

    def whole(self, stacked: jax.Array) -> Any:
        """`[replicas, ...]` as an array of this process alone. Every process calls it."""
        if self.job is None:
            return stacked
        gather = _gather_to(self.home)
        doing = "a gather, such as of a metric's result or of a variable that is summed on read"
        return self.local_view(self.job.run(lambda: gather(stacked), doing))

    def all_parts(self, value: PerReplica) -> Sequence[Any]:
        """The part of each replica of the job. Every process calls it."""
        if self.job is None:
            return value.values
        if value.stacked is not None:
            return list(np.asarray(self.whole(value.stacked)))
        parts = [dense(part) for part in value.values]
        value = PerReplica(parts, value.shapes if value.num_replicas > len(parts) else None)
        if value.num_replicas < self.num_replicas_in_sync:
            value = self.join_arguments(value, shared=False)
        shapes = value.shapes
        if len({len(shape) for shape in shapes}) > 1:
            raise UnevenShapesError(
                f"Expected parts of one rank on all replicas. Got shapes {list(shapes)}."
            )
        largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
        own = padded(parts, largest, parts[0].dtype)
        gathered = np.asarray(self.whole(self.place_local(own)))
        return [cut(row, shape) for row, shape in zip(gathered, shapes, strict=True)]

    def worker_parts(self, value: Any) -> PerReplica | None:
        """A plain value is each worker's own, once a worker however many replicas it has."""
        if self.job is None:
            return None
        own = jnp.asarray(self.local_view(value))
        local = len(self.local_replicas)
        parts = self.all_parts(PerReplica([own] * local))
        return PerReplica(parts[::local])


@functools.lru_cache
def _gather_to(home: Any) -> Any:
    """Copies an array to where mirrored values live."""
    return jax.jit(lambda array: array, out_shardings=home)


def _all_devices() -> list[jax.Device]:
    """The devices of all processes, each process's own together, in the order of the ranks."""
    kind = config.resolve_devices(None)[0].platform
    devices = [d for d in jax.devices() if d.platform == kind]
    return sorted(devices, key=lambda d: (d.process_index, d.id))


def _check_resolver(resolver: Any) -> None:
    if not isinstance(resolver, ClusterResolver):
        raise TypeError(
            f"Expected cluster_resolver to be a ClusterResolver. Got {resolver!r}. Use "
            "stratagem.cluster_resolver.TFConfigClusterResolver() or leave it out."
        )
