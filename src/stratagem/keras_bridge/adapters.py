"""What the data adapters of this package have in common."""

from __future__ import annotations

from stratagem import _keras


class OwnBatches(_keras.DataAdapter):
    """Batches of values that only this package knows, of sizes that are not known before.

    Where JAX's backend is no CPU, Keras moves batches to a device ahead of their turn. These must
    be left as they are: see `backup.install`.
    """

    batch_size = None
    has_partial_batch = None
    partial_batch_size = None
