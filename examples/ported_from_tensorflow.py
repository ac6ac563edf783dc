"""A program for TensorFlow that trains on two GPUs: only the line that imports tf has changed.

It is the custom loop of the tutorials: tf.data, tf.function, a tape, metrics, a checkpoint. To
rehearse two GPUs:
"""

# run with: STRATAGEM_REHEARSE=gpu:2

from __future__ import annotations

import os
import tempfile

from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from stratagem.compat import tensorflow as tf  # was: import tensorflow as tf

images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8, 1).astype("float32")
train_images, test_images, train_labels, test_labels = train_test_split(
    images, labels, test_size=0.2, random_state=0
)

strategy = tf.distribute.MirroredStrategy()
print(f"Number of devices: {strategy.num_replicas_in_sync}")
GLOBAL_BATCH_SIZE = 32 * strategy.num_replicas_in_sync


def scale(image, label):
    return tf.cast(image, tf.float32) / 16, label


dataset = tf.data.Dataset.from_tensor_slices((train_images, train_labels))
dataset = dataset.map(scale).cache().shuffle(1500).batch(GLOBAL_BATCH_SIZE)
test_dataset = tf.data.Dataset.from_tensor_slices((test_images, test_labels))
test_dataset = test_dataset.map(scale).batch(GLOBAL_BATCH_SIZE)
train_dist_dataset = strategy.experimental_distribute_dataset(dataset)
test_dist_dataset = strategy.experimental_distribute_dataset(test_dataset)

with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input(shape=(8, 8, 1)),
            tf.keras.layers.Conv2D(32, 3, activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )
    optimizer = tf.keras.optimizers.Adam(0.002)
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=tf.keras.losses.Reduction.NONE
    )
    test_accuracy = tf.keras.metrics.SparseCategoricalAccuracy()
    seen = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM, trainable=False)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)


def train_step(inputs):
    images, labels = inputs
    with tf.GradientTape() as tape:
        predictions = model(images, training=True)
        loss = tf.nn.compute_average_loss(loss_object(labels, predictions))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    seen.assign_add(tf.cast(tf.shape(images)[0], tf.float32))
    return loss


@tf.function
def distributed_train_step(inputs):
    losses = strategy.run(train_step, args=(inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


@tf.function
def test_epoch(batches):
    for inputs in batches:
        strategy.run(lambda images, labels: test_accuracy(labels, model(images)), args=inputs)


for epoch in range(6):
    losses = [distributed_train_step(inputs) for inputs in train_dist_dataset]
    test_accuracy.reset_state()
    test_epoch(test_dist_dataset)
    print(
        f"epoch {epoch + 1}: loss {tf.reduce_mean(losses).numpy():.4f}, "
        f"test accuracy {test_accuracy.result().numpy():.4f}, rows seen {seen.numpy():.0f}"
    )

with tempfile.TemporaryDirectory() as directory:
    path = checkpoint.save(os.path.join(directory, "ckpt"))
    model.layers[-1].kernel.assign(tf.zeros([64, 10]))
    checkpoint.restore(path)
test_accuracy.reset_state()
test_epoch(test_dist_dataset)
accuracy = test_accuracy.result().numpy()
print(f"restored: test accuracy {accuracy:.4f}")
assert accuracy > 0.9, f"Expected a test accuracy above 0.9. Got {accuracy}."
