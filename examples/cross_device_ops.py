"""The same training under five ways to add up gradients: one curve, five bills.

Each way is a different compiled program. The bill is a formula (`ops.cost`); the tests hold it
against the bytes that the program moves.
"""

from __future__ import annotations

import time

import stratagem

REPLICAS = 4
stratagem.config.set_virtual_devices(REPLICAS)

import keras
import numpy as np

EPOCHS = 5
BATCH = 128
WAYS = [
    stratagem.NcclAllReduce(),
    stratagem.HierarchicalCopyAllReduce(),
    stratagem.ReductionToOneDevice(),
    stratagem.RingAllReduce(),
    stratagem.TreeAllReduce(),
]

rng = np.random.default_rng(0)
x = rng.normal(size=(1024, 32)).astype("float32")
y = np.tanh(x @ rng.normal(size=(32, 1))).astype("float32")

curves = {}
print(f"{'ops':28}{'rounds':>8}{'messages':>10}{'bytes':>10}{'most from one':>15}{'step':>10}")
for ops in WAYS:
    strategy = stratagem.MirroredStrategy(cross_device_ops=ops)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((32,)), keras.layers.Dense(64, activation="tanh"), keras.layers.Dense(1)]
        )
        model.compile(optimizer=keras.optimizers.SGD(0.05, momentum=0.9), loss="mse")
    # The first epoch, in which the step is compiled, is left out of the time.
    first = model.fit(x, y, batch_size=BATCH, epochs=1, verbose=0)
    start = time.perf_counter()
    rest = model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, initial_epoch=1, verbose=0)
    seconds = (time.perf_counter() - start) / ((EPOCHS - 1) * len(x) / BATCH)
    name = type(ops).__name__
    curves[name] = first.history["loss"] + rest.history["loss"]
    cost = ops.cost(model.trainable_variables, REPLICAS)
    print(
        f"{name:28}{cost.rounds:8}{cost.total_messages:10}{cost.total_bytes:10}"
        f"{cost.max_bytes:15}{seconds * 1e3:7.2f} ms"
    )

reference = curves["NcclAllReduce"]
difference = max(np.max(np.abs(np.subtract(curve, reference))) for curve in curves.values())
print("loss of each epoch:", ", ".join(f"{loss:.4f}" for loss in reference))
print(f"largest difference between the five curves: {difference:.1e}")
print(
    f"The bill is for the gradients of one step, {REPLICAS} replicas. NcclAllReduce leaves the "
    "way to the platform: its line is the least that any way needs."
)
assert difference < 1e-5
