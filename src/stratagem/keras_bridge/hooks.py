"""How the bridge attaches itself to Keras: it wraps methods, once, and keeps the originals."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from stratagem import context


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replaces `owner.name` by `around(original, *args, **kwargs)`; a second call does nothing."""
    original = getattr(owner, name)
    if hasattr(original, "_stratagem_original"):
        return

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    wrapper: Any = method if inspect.isclass(owner) else function
    wrapper.__signature__ = inspect.signature(original)  # Keras reads argument names
    wrapper._stratagem_original = original
    setattr(owner, name, wrapper)


def replicated_trace() -> Any:
    """The current frame if it traces a replica's own share of several replicas' work, else None."""
    frame = context.current()
    if frame.trace is None or frame.replica is None or frame.strategy.num_replicas_in_sync == 1:
        return None
    return None if frame.trace.synchronized else frame
