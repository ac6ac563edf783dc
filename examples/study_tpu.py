"""A study note's script for a TPU, with only its imports changed, and a short `fit`.

On a machine without a TPU it ends with an error that says how to rehearse it. To rehearse:
"""

# run with: STRATAGEM_REHEARSE=tpu:8

from __future__ import annotations

import stratagem
import keras
import numpy as np
from keras import layers

tpu_address = ""  # this machine's slice; "local", a TPU's name or "grpc://host:port" do as well

resolver = stratagem.cluster_resolver.TPUClusterResolver(tpu=tpu_address)
stratagem.config.experimental_connect_to_cluster(resolver)
stratagem.tpu.experimental.initialize_tpu_system(resolver)
strategy = stratagem.experimental.TPUStrategy(resolver)

with strategy.scope():
    model = keras.Sequential()
    model.add(layers.Dense(16, activation="relu", input_shape=(10,)))
    model.add(layers.Dense(1))
    optimizer = keras.optimizers.SGD(0.2)
    model.compile(loss=keras.losses.BinaryCrossentropy(from_logits=True), optimizer=optimizer)
model.summary()

# The note ends here. Made-up data: is the sum of ten numbers positive?
rng = np.random.default_rng(0)
features = rng.normal(size=(1001, 10)).astype("float32")
labels = (features.sum(axis=1, keepdims=True) > 0).astype("float32")
model.fit(features, labels, batch_size=64, epochs=5, verbose=2)
print("replicas:", strategy.num_replicas_in_sync, "on", ", ".join(strategy.worker_devices))
