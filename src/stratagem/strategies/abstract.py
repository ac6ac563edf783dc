"""Strategy: what all synchronous strategies share. Read it before the others.

A strategy answers three questions about a traced step: where variables live (`place`), how
updates meet (`cross_device_ops`), and who runs it (`mesh`). Everything else is here, once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import keras

from stratagem import config, context, data, variables
from stratagem.collectives import CrossDeviceOps, NcclAllReduce
from stratagem.step.execute import Executor
from stratagem.step.replica import ReplicaContext
from stratagem.step.trace import LocalValue
from stratagem.strategies.extended import Extended, is_replicated
from stratagem.strategies.layout import Layout
from stratagem.strategies.reductions import gather_leaf, reduce_leaf, variable_value
from stratagem.values import (
    Mirrored,
    PerReplica,
    ReduceOp,
    is_distributed,
    is_whole,
    map_leaves,
)


class Strategy(Layout, Extended):
    """Distributes the steps of a program over replicas. Create one of its subclasses.

    Args:
        devices: one device a replica.
        cross_device_ops: how the replicas' values combine.
    """

    described = False  # True where the devices are only described: it lowers, and runs nothing

    def __init__(
        self,
        devices: Sequence[jax.Device],
        cross_device_ops: CrossDeviceOps | None = None,
    ):
        self._made_at = variables.user_line()
        self._ops = NcclAllReduce() if cross_device_ops is None else cross_device_ops
        self._lay_out(devices)
        self._run = Executor(self, ReplicaContext(self))
        self._call = Executor(self, None)

    @property
    def executor(self) -> Executor:
        """Compiles and runs this strategy's replica functions."""
        return self._run

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas take part in each step."""
        return len(self._devices)

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """Names of the devices of this process that compute."""
        return tuple(config.device_name(d) for d in self._local_devices)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Names of the devices that hold variables."""
        return self.worker_devices

    @property
    def extended(self) -> Strategy:
        """The strategy itself: it has no second object."""
        return self

    @property
    def cluster_resolver(self) -> Any:
        """None: the strategy runs in one process."""
        return None

    # Contexts.

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Makes this strategy current: variables created in the body are its variables.

        Raises:
            RuntimeError: inside another strategy's scope, or inside a replica function.
        """
        self._check_may_enter("scope")
        with context.entered(context.Frame(self)):
            yield self

    def _check_may_enter(self, what: str) -> None:
        frame = context.current()
        if frame.trace is not None and not context.has_strategy():
            raise context.StrategyFound(self)
        if frame.replica is not None and context.has_strategy():
            raise RuntimeError(
                f"Expected {what} of {self!r} in cross-replica context. Got a call inside a "
                f"replica function of {frame.strategy!r}. Use "
                "get_replica_context().merge_call(fn) to leave the replica context."
            )
        if context.has_strategy() and frame.strategy is not self:
            raise RuntimeError(
                f"Expected no other strategy to be current when entering {what} of {self!r}. Got "
                f"{frame.strategy!r}. Leave its scope first; one program has one strategy."
            )

    # Steps.

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None,
        options: Any = None,
    ) -> Any:  # fmt: skip
        """Calls `fn` on every replica, in step, as one compiled program.

        `fn` is traced once for each set of argument shapes; its Python code does not run again.

        Args:
            fn: ordinary Python over tensors and Keras variables.
            args: PerReplica and Mirrored leaves are replaced by the replica's own part; arrays
                go to all replicas; anything else is a constant of the program.
            kwargs: likewise.
            options: accepted for TF's sake (it concerns TPUs).

        Returns:
            fn's result, its tensors as PerReplica values (bare tensors with one replica), Python
            objects as they are.

        Raises:
            ReplicaDependentWriteError: a mirrored variable would differ between replicas.
            ReplicaBranchError: Python code branched on a tensor.
        """
        del options
        _check_call(fn, args)
        trace = context.current().trace
        self._check_may_enter("run")
        if trace is not None:
            return self._run_traced(fn, args, kwargs or {})
        return self._run(fn, tuple(args), kwargs or {})

    def _run_traced(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        """`run` inside `stratagem.function` or `merge_call`: part of the same program."""
        frame = context.current()
        args, kwargs = map_leaves(_local_part, (tuple(args), kwargs))
        inner = context.Frame(self, self._run.replica, frame.trace)
        with context.entered(inner):
            result = fn(*args, **kwargs)
        if self.num_replicas_in_sync == 1:
            return result
        return map_leaves(lambda x: LocalValue(x) if isinstance(x, jax.Array) else x, result)

    def lower(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None
    ) -> jax.stages.Lowered:
        """The program that `run(fn, args, kwargs)` would run, not run: to read or to count.

        With a Keras model's `train_step`, `test_step` or `predict_step` and `args=(batch,)`, a
        global batch as `fit` makes it, it is the program that `fit`, `evaluate` or `predict` runs.
        """
        _check_call(fn, args)
        self._check_may_enter("lower")
        return self._run.lower(fn, tuple(args), kwargs or {})

    def call_function(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a cross-replica function as one compiled program (`stratagem.function`)."""
        return self._call(fn, tuple(args), kwargs)

    def lower_function(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> jax.stages.Lowered:
        """The program that `call_function` would run, not run."""
        return self._call.lower(fn, tuple(args), kwargs)

    # Values.

    def reduce(
        self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None
    ) -> Any:
        """Reduces a value over the replicas. Cross-replica context.

        Args:
            reduce_op: SUM or MEAN.
            value: structure of PerReplica values, as `run` returns them.
            axis: None combines the parts element by element; an axis (or several) is reduced in
                each part too. MEAN then weights by elements, not by replicas, so that uneven and
                empty parts count for what they hold.

        Returns:
            The structure with tensors, IndexedSlices as dense ones. MEAN of integers is float32
            (TF: float64).

        Raises:
            ValueError: the sum of a value that is no PerReplica, or an axis that parts lack.
            UnevenShapesError: with axis=None, parts of different shapes.
            TypeError: parts of booleans.
        """
        op = ReduceOp.from_value(reduce_op)
        self._check_may_enter("reduce")
        return jax.tree.map(lambda leaf: reduce_leaf(self, op, leaf, axis), value, is_leaf=is_whole)

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenates the parts of a PerReplica value along `axis`. Cross-replica context.

        Raises:
            ValueError: a part has no such axis.
            UnevenShapesError: the parts differ in another axis.
            NotImplementedError: the parts are IndexedSlices.
        """
        self._check_may_enter("gather")
        return jax.tree.map(lambda leaf: gather_leaf(self, leaf, axis), value, is_leaf=is_whole)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """A tuple with each local replica's part of a structure; `(value,)` for a plain one.

        Of a variable of this strategy: its value on each replica.
        """
        leaves, tree = jax.tree.flatten(value, is_leaf=is_replicated)
        leaves = [variable_value(self, v) if self._owns_copies(v) else v for v in leaves]
        if not any(is_distributed(leaf) for leaf in leaves):
            return (value,)
        return tuple(
            jax.tree.unflatten(
                tree, [leaf.values[r] if is_distributed(leaf) else leaf for leaf in leaves]
            )
            for r in range(len(self.local_replicas))
        )

    def _owns_copies(self, leaf: Any) -> bool:
        if self._one or not isinstance(leaf, keras.Variable):
            return False
        return self.variable_created_in_scope(leaf)

    # Data.

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Splits each global batch of a dataset among the replicas. See stratagem.data."""
        return data.distribute_dataset(dataset, mesh=self.mesh, options=options, job=self.job)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[Any], Any], options: Any = None
    ) -> Any:
        """Deals the per-replica batches of `dataset_fn(InputContext)` to the replicas."""
        return data.distribute_from_function(
            dataset_fn, mesh=self.mesh, options=options, job=self.job
        )

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def experimental_distribute_values_from_function(self, value_fn: Callable[[Any], Any]) -> Any:
        """A PerReplica of `value_fn(ValueContext)` for each replica."""
        return data.values_from_function(value_fn, self.num_replicas_in_sync, self.local_replicas)

    def __copy__(self) -> NoReturn:
        raise RuntimeError(
            f"Expected one object for each strategy. Got copy.copy({self!r}), whose copy would "
            "not own the variables. Pass the strategy itself."
        )

    def __deepcopy__(self, memo: Any) -> Strategy:
        """The strategy itself, so that copies of what refers to it still belong to it."""
        del memo
        return self

    def __repr__(self) -> str:
        names = ", ".join(self.worker_devices)
        return f"<{type(self).__name__} on [{names}] made at {self._made_at}>"


def _check_call(fn: Any, args: Any) -> None:
    if not callable(fn):
        raise TypeError(
            f"Expected a function to call on every replica. Got {type(fn).__name__}. Write "
            "strategy.run(step, args=(x,)), not strategy.run(step(x))."
        )
    if not isinstance(args, (list, tuple)):
        raise ValueError(
            f"Expected args as a list or tuple. Got {type(args).__name__}. Write args=(x,)."
        )


def _local_part(leaf: Any) -> Any:
    if isinstance(leaf, LocalValue):
        return leaf.local
    if isinstance(leaf, Mirrored):
        return leaf.value
    if isinstance(leaf, PerReplica):
        raise ValueError(
            "Expected PerReplica values among the arguments of the traced function. Got one that "
            "the function captured from outside. Pass it as an argument."
        )
    return leaf
