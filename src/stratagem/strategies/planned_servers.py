"""A strategy whose workers and servers are not there: for tracing steps, see `cli/plan.py`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from stratagem import variables
from stratagem.data.dealt import DealtDataset, DealtIterator
from stratagem.parameter_server.partitioners import Partitioner
from stratagem.parameter_server.plan import Placement, Spec
from stratagem.strategies.abstract import Strategy
from stratagem.strategies.parameter_server import (
    ASYNCHRONOUS,
    Consistency,
    ParameterServerStrategy,
)

_KEPT_BYTES = 1 << 16  # values up to this size are there to be read, such as a learning rate


class PlannedServers(ParameterServerStrategy):
    """Stands for the strategy that a script makes, while a step is traced.

    Variables have a place on servers, and no values but small ones. What would run a step must
    not be reached: whoever makes this strategy stops its program when a step has been traced.

    Make it with `of`. To call the class means that the script makes its strategy: its partitioner
    and its rule of consistency are taken over, the cluster is the planned one.

    Args:
        cluster_resolver: ignored.
        variable_partitioner: of the script.
        settings: others, of which those of the rule of consistency are kept.
    """

    described = True
    cluster_resolver = None  # type: ignore[assignment]  # there is no cluster
    rule: Consistency | None
    link: Any
    _planned: PlannedLink

    def __init__(
        self,
        cluster_resolver: Any = None,
        variable_partitioner: Partitioner | None = None,
        **settings: Any,
    ):
        del cluster_resolver
        self._planned.placed_by(variable_partitioner)
        self.partitioner = repr_of(variable_partitioner)
        rule = {k: settings[k] for k in ("max_staleness", "backup_workers") if k in settings}
        said = Consistency(settings.get("consistency", ASYNCHRONOUS), **rule)
        self.consistency = self.rule or said

    @classmethod
    def of(cls, workers: int, servers: int, rule: Consistency | None = None) -> PlannedServers:
        """A strategy of so many tasks, none of which is there.

        Args:
            workers: how many.
            servers: how many.
            rule: instead of the script's; None for that, or for none.
        """
        self = cls.__new__(cls)
        self.rule = rule
        self.workers = [(f"worker {i}", "planned") for i in range(workers)]
        self.servers = [(f"ps {i}", "planned") for i in range(servers)]
        self.state_dir, self.replication, self.snapshot_seconds = None, 1, float("inf")
        self.job_id, self.partitioner = "planned", ""
        self.told, self.record = [], None  # there is no job that could go on
        self.consistency = rule or Consistency()
        self._planned = PlannedLink(servers)
        self.link = self._planned
        Strategy.__init__(self, jax.local_devices()[:1])
        return self

    def close(self, stop_tasks: bool = False) -> None:
        """Nothing is open."""

    def refuse(self, what: str) -> None:
        """Lets everything come as far as its step."""

    def initialize(self, variable: Any, initializer: Any) -> bool:
        """Gives a new variable its place; False for one that is small enough to have a value."""
        nbytes = np.dtype(variable.dtype).itemsize * np.prod(tuple(variable.shape))
        if variables.is_on_read(variable) or nbytes <= _KEPT_BYTES:
            return False
        self._make(variable, None)
        return True

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """As the strategy that it stands for; its batches can be had directly, too."""
        del options
        return _Batches(dataset)


class PlannedLink:
    """Stands for the way to the servers: says where variables are, and sends nothing.

    Attributes:
        specs: of all variables, by number.
        servers: how many there are.
    """

    def __init__(self, servers: int):
        self.specs: dict[int, Spec] = {}
        self.servers = servers
        self._placement = Placement(servers)
        self._numbers = itertools.count()
        self._values: dict[int, np.ndarray] = {}

    def placed_by(self, partitioner: Partitioner | None) -> None:
        """From now on variables are cut by this partitioner."""
        self._placement = Placement(self.servers, partitioner)

    def create(
        self, name: str, shape: Sequence[int], dtype: str, start: Any, beside: int | None = None,
        policy: Any = None,
    ) -> Spec:  # fmt: skip
        """Gives a variable its place; of a dynamic table, each server its part of the ids."""
        vid = next(self._numbers)
        reference = None if beside is None else self.specs[beside]
        is_table = policy is not None or (reference is not None and reference.dynamic is not None)
        about: dict[str, Any] | None = {} if is_table else None
        spec = self._placement.place(vid, name, shape, dtype, reference, about)
        self.specs[vid] = spec
        if isinstance(start, np.ndarray) and start.nbytes <= _KEPT_BYTES:
            self._values[vid] = np.array(start)
        return spec

    def install(self, units: Sequence[Any]) -> None:
        """There is nobody who would need them."""

    def read(self, spec: Spec, start: int, stop: int) -> np.ndarray:
        """The value of a small variable; of others zeros, in no memory."""
        value = self._values.get(spec.vid)
        if value is None:
            value = np.broadcast_to(np.zeros((), np.dtype(spec.dtype)), spec.shape)
        return value[start:stop] if spec.shape else value

    def assign(self, spec: Spec, op: str, value: np.ndarray, start: int) -> None:
        """Keeps the whole value of a small variable."""
        if op == "set" and value.shape == spec.shape and value.nbytes <= _KEPT_BYTES:
            self._values[spec.vid] = np.array(value)

    def scatter(self, spec: Spec, op: str, indices: np.ndarray, updates: np.ndarray) -> None:
        """Changes nothing: only shapes matter."""


class _Batches(DealtDataset):
    def __iter__(self) -> DealtIterator:
        return _Iterator(iter(self._dataset))


class _Iterator(DealtIterator):
    def __next__(self) -> Any:
        return next(self._batches)


def repr_of(partitioner: Any) -> str:
    """A partitioner as a report names it; empty for none."""
    if partitioner is None:
        return ""
    name = getattr(partitioner, "__name__", type(partitioner).__name__)
    settings = getattr(partitioner, "__dict__", {}) if isinstance(partitioner, Partitioner) else {}
    said = ", ".join(f"{key.lstrip('_')}={value}" for key, value in sorted(settings.items()))
    return f"{name}({said})"
