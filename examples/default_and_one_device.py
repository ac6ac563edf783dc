"""One training function, run without a strategy, on a named device, and on two.

`get_strategy()` always answers: outside any scope with the default strategy, which distributes
nothing. So a library needs no strategy as an argument, and its code can be tested without one.
"""

from __future__ import annotations

import stratagem

stratagem.config.set_virtual_devices(2)

import jax
import keras
import numpy as np

FEATURES = np.random.default_rng(0).normal(size=(96, 3)).astype("float32")
TARGETS = (FEATURES @ np.float32([[2.0], [-1.0], [0.5]]) + 3).astype("float32")


def train(epochs: int) -> np.ndarray:
    """A library function: it asks which strategy is current, and uses that one.

    Returns:
        The trained weights, `[features + 1]`.
    """
    strategy = stratagem.get_strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.layers[0].set_weights([np.zeros((3, 1)), np.zeros(1)])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

    def step(batch):
        features, targets = batch
        with stratagem.GradientTape() as tape:
            per_row = keras.ops.square(model(features) - targets)[:, 0]
            loss = stratagem.nn.compute_average_loss(per_row)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    batches = stratagem.data.batches((FEATURES, TARGETS), 32)
    for _ in range(epochs):
        for batch in strategy.experimental_distribute_dataset(batches):
            losses = strategy.run(step, args=(batch,))
            loss = strategy.reduce("SUM", losses, axis=None)
    where = ", ".join(sorted(str(d) for d in model.layers[0].kernel.value.devices()))
    print(f"{strategy!r}: loss {loss:.2e}, the kernel lives on {where}")
    return np.concatenate([np.ravel(w) for w in model.get_weights()])


print("a strategy is entered:", stratagem.has_strategy())
plain = train(epochs=40)

one_device = stratagem.OneDeviceStrategy("/cpu:1")
with one_device.scope():
    print("a strategy is entered:", stratagem.has_strategy())
    named = train(epochs=40)

with stratagem.MirroredStrategy().scope():
    mirrored = train(epochs=40)

np.testing.assert_allclose(named, plain, rtol=1e-5)
np.testing.assert_allclose(mirrored, plain, rtol=1e-5)
print("all three found", np.round(plain, 3))

# A variable made elsewhere moves to the strategy's device when a step first uses it.
stray = keras.Variable(np.float32(20.0), name="stray")
print("before:", stray.value.devices())
print("the step says", one_device.run(lambda: stray + 1.0))
print("after: ", stray.value.devices())
assert stray.value.devices() == {jax.devices()[1]}

# There is one default strategy, and it is not for users to make.
try:
    type(stratagem.get_strategy())()
except RuntimeError as error:
    print(error)
