"""Keras variables of the coordinator to which closures on workers add: the state of metrics.

What a closure adds waits beside the value until somebody reads that, so the thread that gives
closures their results computes nothing. Whoever knows that a closure is done, however, reads a
value that has its part in it; what is assigned takes the place of all that was added before.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from stratagem import variables

# Short, and nothing that waits for closures is done with it: their thread takes it, too.
_lock = threading.RLock()


class _Moment(threading.local):
    lasts = False


_moment = _Moment()


def make_tallied(variable: Any) -> None:
    """Makes a Keras variable one to which closures add."""
    if not is_tallied(variable):
        value = variable.__dict__.pop("_value", None)
        variable.__class__ = _tallied_class(variable.__class__)
        variable._value = value


def is_tallied(variable: Any) -> bool:
    """True for a variable to which closures add."""
    return hasattr(type(variable), "add_part")


def add(tallied: Sequence[Any], parts: Sequence[np.ndarray]) -> None:
    """Adds a closure's parts of some variables, at once. Any thread."""
    with _lock:
        for variable, part in zip(tallied, parts, strict=True):
            variable.add_part(part)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """In the body no closure adds anything: it reads and assigns. It must not wait for one."""
    with _lock:
        yield


@contextlib.contextmanager
def one_moment(read: Iterable[Any]) -> Iterator[None]:
    """What the body reads of some variables belongs together, such as a mean's total and count."""
    with _lock:
        for variable in read:
            variable._value  # noqa: B018 - has all parts from now on
    _moment.lasts = True
    try:
        yield
    finally:
        _moment.lasts = False


@functools.cache
def _tallied_class(base: Any) -> Any:
    """The class of a variable of class `base` to which closures add."""

    class TalliedVariable(base):
        _whole: Any = None  # without the parts that wait
        _part: np.ndarray | None = None  # their sum

        def add_part(self, part: np.ndarray) -> None:
            """Adds what a closure has returned."""
            self._part = part if self._part is None else self._part + part

        @property
        def _value(self) -> Any:
            with _lock:
                if self._part is not None and not _moment.lasts:
                    whole = np.asarray(self._whole)
                    total = (whole + self._part).astype(whole.dtype)
                    with jax.ensure_compile_time_eval():  # it may be read while JAX traces
                        self._whole = variables.home_strategy(self).place(total)
                    self._part = None
                return self._whole

        @_value.setter
        def _value(self, value: Any) -> None:
            with _lock:
                self._whole, self._part = value, None

    return TalliedVariable
