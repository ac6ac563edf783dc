"""The hooks that make plain Keras code run under a strategy. Importing stratagem installs them."""

from __future__ import annotations

from stratagem.keras_bridge import (
    backup,
    kept_batches,
    layers,
    losses,
    metrics,
    optimizer,
    same_batches,
    served,
    shapes,
    trainer,
    variables,
    workers,
)


def install() -> None:
    """Attaches all hooks. Importing stratagem calls it; a second call does nothing."""
    for room in (
        variables,
        optimizer,
        losses,
        layers,
        metrics,
        shapes,
        trainer,
        workers,
        backup,
        kept_batches,
        same_batches,
        served,
    ):
        room.install()
