"""The tutorial on distributed training with Keras: fit, callbacks, saving, two strategies."""

import json
import os
import tempfile

import numpy as np
import tensorflow as tf

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])

rng = np.random.default_rng(0)
labels = rng.integers(0, 4, 160)
images = rng.integers(0, 256, (160, 6, 6, 1)).astype("uint8")
images[np.arange(160), labels] = 255
train, test = slice(0, 128), slice(128, None)

BATCH_SIZE_PER_REPLICA = 16
BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync


def scale(image, label):
    image = tf.cast(image, tf.float32)
    image /= 255
    return image, label


train_dataset = tf.data.Dataset.from_tensor_slices((images[train], labels[train]))
train_dataset = train_dataset.map(scale).cache().batch(BATCH_SIZE).prefetch(tf.data.AUTOTUNE)
eval_dataset = tf.data.Dataset.from_tensor_slices((images[test], labels[test]))
eval_dataset = eval_dataset.map(scale, num_parallel_calls=tf.data.AUTOTUNE).batch(BATCH_SIZE)

with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input(shape=(6, 6, 1)),
            tf.keras.layers.Conv2D(4, 3, activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(8, activation="relu"),
            tf.keras.layers.Dense(4),
        ]
    )
    weights = np.random.default_rng(1)
    model.set_weights([weights.normal(0, 0.3, w.shape) for w in model.get_weights()])
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.Adam(learning_rate=0.001),
        metrics=["accuracy"],
    )

directory = tempfile.mkdtemp()
learning_rates = []


def decay(epoch):
    if epoch < 2:
        return 1e-2
    return 1e-3


class PrintLR(tf.keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        learning_rates.append(float(model.optimizer.learning_rate.numpy()))


callbacks = [
    tf.keras.callbacks.ModelCheckpoint(
        filepath=os.path.join(directory, "ckpt_{epoch}.weights.h5"), save_weights_only=True
    ),
    tf.keras.callbacks.LearningRateScheduler(decay),
    PrintLR(),
]
history = model.fit(train_dataset, epochs=4, callbacks=callbacks, verbose=0)

model.load_weights(os.path.join(directory, "ckpt_3.weights.h5"))
third = model.evaluate(eval_dataset, verbose=0)
model.load_weights(os.path.join(directory, "ckpt_4.weights.h5"))
fourth = model.evaluate(eval_dataset, verbose=0)

# Save the whole model; load it without a strategy, and with one.

path = os.path.join(directory, "my_model.keras")
model.save(path)
plain = tf.keras.models.load_model(path)
plain.compile(
    loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    optimizer=tf.keras.optimizers.Adam(),
    metrics=["accuracy"],
)
unreplicated = plain.evaluate(eval_dataset, verbose=0)
with strategy.scope():
    replicated_model = tf.keras.models.load_model(path)
    replicated_model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.Adam(),
        metrics=["accuracy"],
    )
    replicated = replicated_model.evaluate(eval_dataset, verbose=0)

print(
    "RESULT",
    json.dumps(
        {
            "loss": history.history["loss"],
            "accuracy": history.history["accuracy"],
            "learning rates": learning_rates,
            "third": third,
            "fourth": fourth,
            "unreplicated": unreplicated,
            "replicated": replicated,
        }
    ),
)
