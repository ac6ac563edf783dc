"""A contrastive loss over the global batch, in plain `fit`.

Each row's rivals are the rows of all replicas: `all_gather` gives every replica the embeddings of
the whole batch, and its gradient sends back what the replicas owe each other. So two replicas
train as one does, on uneven batches too. Without the gather each row has half as many rivals, and
the loss is another one.

The loss: InfoNCE of van den Oord, Li and Vinyals, "Representation Learning with Contrastive
Predictive Coding", 2018, equation 4, between two noisy views of an image.
"""

from __future__ import annotations

import stratagem

stratagem.config.set_virtual_devices(2)

import keras
import numpy as np
from keras import layers, ops
from sklearn.datasets import load_digits

ROWS, BATCH = 1001, 64  # The last batch of an epoch has 41 rows: 21 and 20.
SIZE = 16
TEMPERATURE = 0.1

images = (load_digits().data[:ROWS] / 16).astype("float32")
noise = np.random.default_rng(0).normal(0, 0.2, size=(ROWS, 2, 64)).astype("float32")
views = images[:, None] + noise  # [rows, 2, pixels]


class Contrastive(keras.losses.Loss):
    """InfoNCE between the two views of each row.

    Args:
        gather: rivals from all replicas; else from the row's own replica alone.
    """

    def __init__(self, gather: bool):
        super().__init__(name="contrastive")
        self._gather = gather

    def call(self, y_true, y_pred):
        """One loss a row; `y_pred` is `[rows, 2, SIZE]`, `y_true` is not used."""
        a, b = ops.unstack(ops.normalize(y_pred, axis=-1), 2, axis=1)
        partners = ops.arange(a.shape[0])
        if self._gather:
            replica = stratagem.get_replica_context()
            rows = replica.all_gather(ops.full((1,), b.shape[0]), axis=0)  # of each replica
            mine = replica.replica_id_in_sync_group
            partners += ops.sum(ops.where(ops.arange(rows.shape[0]) < mine, rows, 0))
            b = replica.all_gather(b, axis=0)
        logits = ops.matmul(a, ops.transpose(b)) / TEMPERATURE
        return keras.losses.sparse_categorical_crossentropy(partners, logits, from_logits=True)


def train(strategy: stratagem.Strategy, gather: bool) -> list[float]:
    """The loss of each epoch."""
    keras.utils.set_random_seed(5)
    with strategy.scope():
        encoder = keras.Sequential(
            [keras.Input((2, 64)), layers.Dense(64, activation="relu"), layers.Dense(SIZE)]
        )
        encoder.compile(optimizer=keras.optimizers.Adam(1e-3), loss=Contrastive(gather))
    unused = np.zeros((ROWS, 1))
    return encoder.fit(views, unused, batch_size=BATCH, epochs=4, verbose=0).history["loss"]


one = train(stratagem.OneDeviceStrategy("/cpu:0"), gather=True)
two = train(stratagem.MirroredStrategy(), gather=True)
alone = train(stratagem.MirroredStrategy(), gather=False)
for name, losses in {"one": one, "two, gathered": two, "two, not gathered": alone}.items():
    print(f"{name:18} loss of each epoch: {', '.join(f'{loss:.4f}' for loss in losses)}")
print(f"one against two, gathered: largest difference {np.max(np.abs(np.subtract(one, two))):.1e}")
np.testing.assert_allclose(two, one, rtol=1e-4)
assert abs(alone[0] - one[0]) > 0.1, "Expected fewer rivals to change the loss."
