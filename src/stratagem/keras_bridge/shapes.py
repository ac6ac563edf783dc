"""Keras infers shapes by calling layers and losses without values: as on one replica."""

from __future__ import annotations

from typing import Any

from stratagem import _keras, context
from stratagem.keras_bridge.hooks import wrap


def install() -> None:
    """Attaches the bridge to Keras' shape inference."""
    wrap(_keras.backend, "compute_output_spec", _on_a_replica)


def _on_a_replica(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Code that asks for its replica context finds one, whose collectives only have shapes.

    Keras calls a model's layers when the model is built, and its loss before the first step, both
    in the strategy's scope. A loss over the global batch must not meet `None` there.
    """
    frame = context.current()
    if frame.trace is not None or frame.replica is not None:
        return original(*args, **kwargs)
    with context.entered(context.Frame(frame.strategy, replica=frame.strategy.executor.replica)):
        return original(*args, **kwargs)
