"""Which replica went wrong: checks of the copies that replicas hold, and of what they compute.

`check` looks at variables between steps, `CheckReplicas` does so during `fit`, and
`check_numerics` looks inside the steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from stratagem.errors import DivergedError
from stratagem.step import numerics
from stratagem.strategies import Strategy

_SHOWN = 20  # offenders listed in full


def check(*targets: Any) -> None:
    """Looks for a replica that holds NaN, infinity, or a mirrored variable unlike the others'.

    Copies are compared bit by bit with replica 0's. Call it between steps; it reads every copy
    back to the host.

    Args:
        targets: models (with their optimizers and metrics), layers, optimizers, metrics, variables,
            or a strategy for all variables that its `run` has touched.

    Raises:
        DivergedError: names each variable, the replica, and the first index that is wrong; the
            first offender stands first.
        TypeError: a target has no variables.
    """
    found = {id(v): v for target in targets for v in _variables_of(target)}
    offences = [line for variable in found.values() for line in _offences(variable)]
    if offences:
        more = [f"  and {len(offences) - _SHOWN} more"] if len(offences) > _SHOWN else []
        raise DivergedError(
            "Expected the same finite values on all replicas. Got:\n"
            + "\n".join([*offences[:_SHOWN], *more])
            + "\nFind the step that made them with stratagem.debug.check_numerics()."
        )


@contextlib.contextmanager
def check_numerics() -> Iterator[None]:
    """Steps in the body of the `with` say which replica first meets NaN or infinity, and in what.

    It covers `run`, `stratagem.function`, `fit`, `evaluate` and `predict`. Looked at, on each
    replica: variables and arguments before the step, gradients and other values before they are
    combined, results and written values after. A step that fails stores nothing. Each step is
    compiled anew for the checks and waited for; steps outside the body are as fast as ever.

    With a LossScaleOptimizer gradients may overflow by design, which is reported all the same.

    Raises:
        DivergedError: names the replicas, the variables and the stage.
    """
    with numerics.checking():
        yield


class CheckReplicas(keras.callbacks.Callback):
    """Calls `stratagem.debug.check(model)` during `fit`.

    Args:
        every: batches between two checks; each also runs at the end of an epoch.
    """

    def __init__(self, every: int = 1):
        super().__init__()
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"Expected every as a number of batches, at least 1. Got {every!r}.")
        self._every = every
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches += 1
        if self._batches % self._every == 0:
            check(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        check(self.model)


def _variables_of(target: Any) -> list[Any]:
    if isinstance(target, keras.Variable):
        return [target]
    if isinstance(target, Strategy):
        return target.executor.touched
    if not hasattr(target, "variables"):
        raise TypeError(
            "Expected models, layers, optimizers, metrics, variables or a strategy to check. Got "
            f"{target!r}."
        )
    found = list(target.variables)
    if isinstance(target, keras.Model):
        found += target.metrics_variables
        if getattr(target, "optimizer", None) is not None:
            found += target.optimizer.variables
    return found


def _offences(variable: Any) -> list[str]:
    """One line for each replica on which the variable is wrong."""
    component = hasattr(variable, "components")
    copies = _copies(variable.components if component else variable._value, component)
    lines = []
    for replica, copy in enumerate(copies):
        wrong = np.zeros(copy.shape, bool)
        if np.issubdtype(copy.dtype, np.inexact):
            wrong = ~np.isfinite(copy)
        what = "holds {value}"
        if not wrong.any() and not component:
            wrong = _bits(copy) != _bits(copies[0])
            what = "holds {value}, replica 0 holds {first}"
        if wrong.any():
            index = tuple(int(i) for i in np.argwhere(wrong)[0])
            text = what.format(value=copy[index], first=copies[0][index])
            lines.append(
                f"  variable {variable.path!r}: replica {replica} {text} at index {index} "
                f"({int(wrong.sum())} of {copy.size} elements are wrong)"
            )
    return lines


def _copies(value: Any, component: bool) -> list[np.ndarray]:
    """What each replica holds, in replica order."""
    if component:
        return [_readable(part) for part in np.asarray(value)]
    shards = [] if value is None else value.addressable_shards
    return [_readable(s.data) for s in sorted(shards, key=lambda s: s.replica_id)]


def _readable(data: Any) -> np.ndarray:
    """A NumPy array; extended floats (bfloat16, float8) in float32, which holds all of them."""
    array = np.asarray(data)
    return array.astype(np.float32) if array.dtype.kind == "V" else array


def _bits(array: np.ndarray) -> np.ndarray:
    """Floats as integers of the same bits: -0.0 is then not 0.0."""
    floats = array.dtype.kind in "fc" and array.dtype.itemsize <= 8
    return array.view(f"u{array.dtype.itemsize}") if floats else array
