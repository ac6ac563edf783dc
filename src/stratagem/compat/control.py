"""Branches, loops, printing and checks: tf.cond, tf.while_loop, tf.print, tf.debugging."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stratagem import config, context
from stratagem.compat.tensors import as_tensor


def cond(pred: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
    """One of two functions, by a condition (tf.cond).

    In a compiled function both are traced, so that both must return the same structure, and
    neither may write to variables: return the new value and assign it afterwards.
    """
    if not isinstance(pred, jax.core.Tracer):
        return true_fn() if pred else false_fn()
    return jax.lax.cond(as_tensor(pred), true_fn, false_fn)


def while_loop(
    cond: Callable[..., Any], body: Callable[..., Any], loop_vars: Sequence[Any], **kwargs: Any
) -> Any:
    """Repeats `body(*loop_vars)` while `cond(*loop_vars)` holds (tf.while_loop).

    TensorFlow's other arguments concern its executor and are ignored, but for
    `maximum_iterations`.
    """
    limit = kwargs.get("maximum_iterations")
    values = jax.tree.map(as_tensor, tuple(loop_vars))

    def step(state: Any) -> Any:
        count, now = state
        after = body(*now)
        after = tuple(after) if isinstance(after, (list, tuple)) else (after,)
        return count + 1, jax.tree.map(lambda old, new: jnp.asarray(new, old.dtype), now, after)

    def goes_on(state: Any) -> Any:
        count, now = state
        holds = as_tensor(cond(*now))
        return holds if limit is None else jnp.logical_and(holds, count < limit)

    return jax.lax.while_loop(goes_on, step, (jnp.int32(0), values))[1]


def map_fn(fn: Callable[[Any], Any], elems: Any, *_: Any, **__: Any) -> Any:
    """`fn` of each row of a tensor, or of a tuple or dict of tensors, stacked (tf.map_fn)."""
    rows = jax.tree.map(as_tensor, elems, is_leaf=lambda x: isinstance(x, list))
    return jax.lax.map(fn, rows)


def print_(*inputs: Any, **kwargs: Any) -> None:
    """Prints values to stderr, also from inside a compiled function, at each run (tf.print).

    There each replica prints its own line. `end`, `sep` and `output_stream` (a file) are as in
    TensorFlow; what else it takes is ignored.
    """
    separator, end = kwargs.get("sep", " "), kwargs.get("end", "\n")
    stream = kwargs.get("output_stream", sys.stderr)

    def write(*values: Any) -> None:
        text = separator.join(str(np.asarray(v)) if hasattr(v, "shape") else str(v) for v in values)
        print(text, end=end, file=stream)

    if context.current().trace is None:
        write(*inputs)
        return
    known = {i: x for i, x in enumerate(inputs) if not isinstance(x, jax.core.Tracer)}

    def back(*traced: Any) -> None:
        remaining = iter(traced)
        write(*(known[i] if i in known else next(remaining) for i in range(len(inputs))))

    jax.debug.callback(back, *(x for x in inputs if isinstance(x, jax.core.Tracer)))


@contextlib.contextmanager
def device(device_name: Any) -> Iterator[None]:
    """Where new arrays live by default (tf.device). A strategy places its own values."""
    with jax.default_device(None if device_name is None else config.resolve_device(device_name)):
        yield


def executing_eagerly() -> bool:
    """False inside a compiled function (tf.executing_eagerly)."""
    return context.current().trace is None


def _check(what: str, holds: Callable[[np.ndarray, np.ndarray], Any]) -> Callable[..., None]:
    def check(x: Any, y: Any, message: str | None = None, **_: Any) -> None:
        values = (as_tensor(x), as_tensor(y))
        if any(isinstance(v, jax.core.Tracer) for v in values):
            raise NotImplementedError(
                f"Expected assert_{what} outside compiled functions. Got it in one. Return the "
                "values and check them outside, or use jax.experimental.checkify."
            )
        left, right = (np.asarray(v) for v in values)
        if not np.all(holds(left, right)):
            raise ValueError(
                f"Expected {what.replace('_', ' ')}: {message or 'the two values'}. Got {left} "
                f"and {right}. Check what computed them."
            )

    check.__name__ = f"assert_{what}"
    check.__doc__ = f"Raises a ValueError unless all elements are {what.replace('_', ' ')}."
    return check


DEBUGGING: dict[str, Any] = {
    "assert_equal": _check("equal", np.equal),
    "assert_greater": _check("greater", np.greater),
    "assert_greater_equal": _check("greater_equal", np.greater_equal),
    "assert_less": _check("less", np.less),
    "assert_less_equal": _check("less_equal", np.less_equal),
    "assert_near": _check("near", lambda x, y: np.isclose(x, y, 1e-5, 1e-5)),
}
