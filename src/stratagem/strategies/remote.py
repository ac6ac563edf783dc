"""Keras variables whose values live on parameter servers.

The variable on the coordinator is the Keras variable that it always was, of a subclass whose value
is fetched when it is asked for and sent when it is set. Inside a traced step nothing is fetched:
there the variable is an input of the program, as everywhere.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from stratagem import _keras, context, variables
from stratagem.parameter_server.plan import Spec
from stratagem.parameter_server.policy import Policy
from stratagem.parameter_server.tables import in_order
from stratagem.strategies.sharded import ShardedVariable
from stratagem.values import as_array

WHOLE_BYTES = 4 << 20  # initial values up to this size are drawn as Keras draws them

# The variable that the one being created is a slot of: they live together.
_reference: contextvars.ContextVar[Any] = contextvars.ContextVar("stratagem_slot_of", default=None)

# How the dynamic table that is being created behaves.
_policy: contextvars.ContextVar[Policy | None] = contextvars.ContextVar(
    "stratagem_policy", default=None
)


@contextlib.contextmanager
def dynamic_policy(policy: Policy) -> Iterator[None]:
    """The variable that is created in the body is a dynamic table."""
    token = _policy.set(policy)
    try:
        yield
    finally:
        _policy.reset(token)


def refuse_whole(variable: Any, initializer: Any) -> None:
    """Raises ValueError for a dynamic table whose initial values only a call could make."""
    if current_policy() is not None:
        raise ValueError(
            f"initializer: expected zeros, ones, a constant, or RandomUniform, RandomNormal or "
            f"TruncatedNormal, with which servers can make rows of {variable.path!r} one at a "
            f"time. Got {initializer!r}, which makes a whole tensor. Choose one of those."
        )


def current_policy() -> Policy | None:
    """Of the dynamic table that is being created; None for other variables."""
    return _policy.get()


@contextlib.contextmanager
def slot_of(variable: Any) -> Iterator[None]:
    """Variables of its shape that are created in the body live beside it."""
    token = _reference.set(variable)
    try:
        yield
    finally:
        _reference.reset(token)


def is_remote(variable: Any) -> bool:
    """True for a variable whose value lives on parameter servers."""
    return hasattr(type(variable), "remote_spec")


def beside(shape: tuple[int, ...]) -> int | None:
    """The number of the variable that a new one of this shape is a slot of."""
    reference = _reference.get()
    if reference is None or not is_remote(reference) or tuple(reference.shape) != shape:
        return None
    return reference.remote_spec.vid


def make_remote(variable: Any, spec: Spec, link: Any) -> None:
    """Makes a Keras variable one whose value is on the servers, where `spec` says."""
    variable.__dict__.pop("_value", None)
    base = variable.__class__
    if spec.dynamic is not None:
        variable.__class__ = _dynamic_class(base)
    else:
        variable.__class__ = _sharded_class(base) if len(spec.shards) > 1 else _remote_class(base)
    variable.__dict__["_remote"] = (spec, link)


@functools.cache
def _remote_class(base: Any) -> Any:
    """The class of a variable of class `base` whose value is on one server."""

    class RemoteVariable(base):
        @property
        def remote_spec(self) -> Spec:
            """Where its value is."""
            return self.__dict__["_remote"][0]

        @property
        def _value(self) -> Any:
            return jnp.asarray(as_array(self.read(0, _rows(self))))

        @_value.setter
        def _value(self, value: Any) -> None:
            if value is not None:
                self.assign_rows(0, np.asarray(value))

        @property
        def value(self) -> Any:
            """The current value; one request to the servers, outside of a traced step."""
            if _keras.in_stateless_scope():  # of a traced step, or of Keras' shape inference
                if _of_shapes(self):
                    return self._maybe_autocast(jnp.zeros(tuple(self.shape), self.dtype))
                return base.value.fget(self)
            return self._maybe_autocast(self._value)

        def read(self, start: int, stop: int) -> np.ndarray:
            """Rows of its value, `[stop - start, ...]`; of a scalar the whole."""
            spec, link = self.__dict__["_remote"]
            return link.read(spec, start, stop)

        def assign_rows(self, start: int, rows: np.ndarray) -> None:
            """Sets rows of its value."""
            spec, link = self.__dict__["_remote"]
            link.assign(spec, "set", np.asarray(rows, np.dtype(spec.dtype)), start)

        def add_to_value(self, delta: Any) -> None:
            """Adds on the servers, so that no addition made meanwhile is lost."""
            spec, link = self.__dict__["_remote"]
            link.assign(spec, "add", np.asarray(delta, np.dtype(spec.dtype)), 0)

        def __repr__(self) -> str:
            spec, _ = self.__dict__["_remote"]
            where = ", ".join(f"ps {shard.server}" for shard in spec.shards)
            return f"<Variable {variables.describe(self)} on {where}>"

    return RemoteVariable


@functools.cache
def _sharded_class(base: Any) -> Any:
    """The class of a variable of class `base` whose rows are on several servers."""

    remote: Any = _remote_class(base)

    class ShardedRemoteVariable(ShardedVariable, remote):
        def scatter(self, op: str, indices: np.ndarray, updates: np.ndarray) -> None:
            """Changes some rows on the servers; see ShardedVariable."""
            spec, link = self.__dict__["_remote"]
            link.scatter(spec, op, indices, np.asarray(updates, np.dtype(spec.dtype)))

        def read_rows(self, indices: np.ndarray) -> np.ndarray:
            """Rows by ascending, distinct numbers, in one request; see ShardedVariable."""
            spec, link = self.__dict__["_remote"]
            return link.read_rows(spec, np.asarray(indices, np.int64))

        @property
        def shard_ranges(self) -> Sequence[tuple[int, int]]:  # type: ignore[override]
            """First row and end of each shard."""
            return [(shard.start, shard.stop) for shard in self.remote_spec.shards]

    return ShardedRemoteVariable


@functools.cache
def _dynamic_class(base: Any) -> Any:
    """The class of a variable of class `base` that is a dynamic table, or a slot of one."""

    remote: Any = _remote_class(base)

    class DynamicRemoteVariable(remote):
        def read(self, start: int, stop: int) -> np.ndarray:
            """Refused: it has rows by id, and as many as there are ids."""
            raise ValueError(self._refusal())

        def assign_rows(self, start: int, rows: np.ndarray) -> None:
            """Refused as `read` is."""
            raise ValueError(self._refusal())

        def add_to_value(self, delta: Any) -> None:
            """Refused as `read` is."""
            raise ValueError(self._refusal())

        def _refusal(self) -> str:
            return (
                f"Expected rows of {self.path!r} to be asked for by id. Got a request for its "
                "whole value: it belongs to a dynamic table, which has no size. Use "
                "DynamicTable.items() for ids and rows; save its optimizer's slots with snapshots "
                "(state_dir), and the model with include_optimizer=False."
            )

        def read_rows(self, ids: np.ndarray) -> np.ndarray:
            """Rows of ids, int64 ascending and distinct; initial values where there is no row."""
            spec, link = self.__dict__["_remote"]
            ordered = in_order(ids, len(spec.shards))
            return link.read_rows(spec, ordered)[np.argsort(ordered)]

        def items(self) -> tuple[np.ndarray, np.ndarray]:
            """All ids, and their rows."""
            spec, link = self.__dict__["_remote"]
            return link.items(spec)

        def put(self, ids: np.ndarray, rows: np.ndarray) -> None:
            """Sets rows of ids, and makes those that are not there."""
            spec, link = self.__dict__["_remote"]
            link.put(spec, ids, np.asarray(rows, np.dtype(spec.dtype)))

    return DynamicRemoteVariable


def _of_shapes(variable: Any) -> bool:
    """Whether Keras infers shapes from a variable: it asks for the value, and needs none.

    Every model is called so before its first step; a table may be larger than this process.
    """
    if context.current().trace is not None or not _keras.in_symbolic_scope():
        return False
    return _keras.get_stateless_scope().get_current_value(variable) is None


def _rows(variable: Any) -> int:
    shape = tuple(variable.shape)
    return shape[0] if shape else 1
