"""A contrastive loss over the global batch: each row's rivals are the rows of all replicas.

`all_gather` inside a replica function gives every replica the embeddings of the whole batch, and
its gradient sends back what they owe to each other. So two replicas train as one does; without
the gather each row has half as many rivals, and the loss is another one.

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

BATCH = 50
STEPS = 20
TEMPERATURE = 0.1

images = (load_digits().data[: BATCH * STEPS] / 16).astype("float32")
noise = np.random.default_rng(0).normal(0, 0.2, size=(2, *images.shape)).astype("float32")
views = (images + noise[0], images + noise[1])


def train(strategy: stratagem.Strategy, gather: bool) -> list[float]:
    """Trains an encoder with a custom loop.

    Args:
        strategy: whose replicas share each batch.
        gather: rivals from all replicas; else from the row's own replica.

    Returns:
        The loss of each step.
    """
    keras.utils.set_random_seed(5)
    with strategy.scope():
        encoder = keras.Sequential(
            [keras.Input((64,)), layers.Dense(64, activation="relu"), layers.Dense(16)]
        )
        optimizer = keras.optimizers.Adam(1e-3)
        optimizer.build(encoder.trainable_variables)

    def loss_of(view_a, view_b):
        a = ops.normalize(encoder(view_a, training=True))
        b = ops.normalize(encoder(view_b, training=True))
        rivals, first = b, 0
        if gather:
            context = stratagem.get_replica_context()
            rivals = context.all_gather(b, axis=0)
            # This replica's rows in the gathered batch begin here.
            first = context.replica_id_in_sync_group * ops.shape(b)[0]
        logits = ops.matmul(a, ops.transpose(rivals)) / TEMPERATURE
        partners = first + ops.arange(ops.shape(a)[0])
        per_row = keras.losses.sparse_categorical_crossentropy(partners, logits, from_logits=True)
        return stratagem.nn.compute_average_loss(per_row)

    def step(batch):
        with stratagem.GradientTape() as tape:
            loss = loss_of(*batch)
        gradients = tape.gradient(loss, encoder.trainable_variables)
        optimizer.apply_gradients(zip(gradients, encoder.trainable_variables, strict=True))
        return loss

    data = strategy.experimental_distribute_dataset(stratagem.data.batches(views, BATCH))
    return [
        float(strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None))
        for batch in data
    ]


one = train(stratagem.OneDeviceStrategy("/cpu:0"), gather=True)
two = train(stratagem.MirroredStrategy(), gather=True)
alone = train(stratagem.MirroredStrategy(), gather=False)
for name, losses in {"one": one, "two, gathered": two, "two, not gathered": alone}.items():
    print(f"{name:18} first loss {losses[0]:.4f}, last loss {losses[-1]:.4f}")
print(f"one against two, gathered: largest difference {np.max(np.abs(np.subtract(one, two))):.1e}")
np.testing.assert_allclose(one, two, rtol=1e-4)
