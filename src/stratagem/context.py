"""Who is current: a stack of frames for each thread, as tf.distribute keeps it.

The bottom of the stack is the default strategy in replica context. `scope()` pushes a frame in
cross-replica context, `run` a frame in replica context, `merge_call` one in cross-replica context
again. A frame may belong to a trace (see step/trace.py): then values in it are JAX tracers.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class Frame:
    """One entry of the stack.

    Attributes:
        strategy: the current strategy.
        replica: the replica context, or None in cross-replica context.
        trace: the trace that is being recorded, or None outside a compiled program.
        entered: True when a `with strategy.scope()` made it, False for a persistent one.
    """

    strategy: Any
    replica: Any = None
    trace: Any = None
    entered: bool = True


_frames: contextvars.ContextVar[tuple[Frame, ...]] = contextvars.ContextVar(
    "stratagem_frames", default=()
)
_default: list[Frame] = []


def set_default(frame: Frame) -> None:
    """Installs the frame of the default strategy. Called once, when stratagem is imported."""
    _default[:] = [frame]


def has_default() -> bool:
    """True once the default strategy exists."""
    return bool(_default)


def is_default(strategy: Any) -> bool:
    """True for the default strategy, which owns no variables and no devices."""
    return bool(_default) and strategy is _default[0].strategy


def current() -> Frame:
    """The innermost frame; the default strategy's when nothing was entered."""
    frames = _frames.get()
    return frames[-1] if frames else _default[0]


def depth() -> int:
    """How many frames are open in this thread."""
    return len(_frames.get())


@contextlib.contextmanager
def entered(frame: Frame) -> Iterator[Frame]:
    """Makes `frame` the innermost one for the body of a `with`."""
    token = _frames.set((*_frames.get(), frame))
    try:
        yield frame
    finally:
        _frames.reset(token)


class StrategyFound(RuntimeError):
    """Raised where a function that is traced without a strategy turns out to use one."""

    def __init__(self, strategy: Any):
        super().__init__(
            f"Expected {strategy!r} to be current. Got a call under the default strategy. Enter "
            "its scope, or decorate the calling function with @stratagem.function."
        )
        self.strategy = strategy


def set_persistent(frame: Frame | None) -> None:
    """Replaces the bottom frame (`experimental_set_strategy`); None takes it away."""
    frames = _frames.get()
    if any(f.entered for f in frames):
        raise RuntimeError(
            "Expected experimental_set_strategy to be called outside any strategy scope. Got a "
            f"call inside the scope of {frames[-1].strategy!r}. Leave the scope first."
        )
    _frames.set(() if frame is None else (dataclasses.replace(frame, entered=False),))


def experimental_set_strategy(strategy: Any) -> None:
    """Makes a strategy current for good, as a scope that is never left; None ends that.

    Raises:
        RuntimeError: inside a `with strategy.scope()`.
    """
    plain = strategy is None or is_default(strategy)
    set_persistent(None if plain else Frame(strategy))


def get_strategy() -> Any:
    """The current strategy; the default strategy when none was entered. Any thread."""
    return current().strategy


def has_strategy() -> bool:
    """True when a strategy other than the default one is current."""
    return not is_default(current().strategy)


def in_cross_replica_context() -> bool:
    """True in `scope()` and in a `merge_call`, False in `run` and under the default strategy."""
    return current().replica is None


def get_replica_context() -> Any:
    """The current replica's context, or None in cross-replica context."""
    return current().replica
