"""The custom training loop of TensorFlow's tutorials, with only its imports changed.

On one device it trains on one replica. To rehearse two GPUs:
"""

# run with: STRATAGEM_REHEARSE=gpu:2

from __future__ import annotations

import stratagem
import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

images, labels = load_digits(return_X_y=True)
images = (images.reshape(-1, 8, 8, 1) / 16).astype("float32")
train_images, test_images, train_labels, test_labels = train_test_split(
    images, labels, test_size=0.2, random_state=0
)

strategy = stratagem.distribute.MirroredStrategy()
print(f"Number of devices: {strategy.num_replicas_in_sync}")

BATCH_SIZE_PER_REPLICA = 32
GLOBAL_BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync
EPOCHS = 6

# tf.data.Dataset.from_tensor_slices(...).shuffle(...).batch(...)
train_dataset = stratagem.data.batches(
    (train_images, train_labels), GLOBAL_BATCH_SIZE, shuffle_seed=1
)
test_dataset = stratagem.data.batches((test_images, test_labels), GLOBAL_BATCH_SIZE)

train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)
test_dist_dataset = strategy.experimental_distribute_dataset(test_dataset)


def create_model():
    regularizer = keras.regularizers.L2(1e-5)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu", kernel_regularizer=regularizer),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu", kernel_regularizer=regularizer),
            keras.layers.Dense(10, kernel_regularizer=regularizer),
        ]
    )


with strategy.scope():
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def compute_loss(labels, predictions, model_losses):
        per_example_loss = loss_object(labels, predictions)
        loss = stratagem.nn.compute_average_loss(per_example_loss)
        if model_losses:
            loss += stratagem.nn.scale_regularization_loss(keras.ops.stack(model_losses))
        return loss

    test_loss = keras.metrics.Mean(name="test_loss")
    train_accuracy = keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
    test_accuracy = keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")

    model = create_model()
    optimizer = keras.optimizers.Adam(learning_rate=0.002)


def train_step(inputs):
    images, labels = inputs

    with stratagem.GradientTape() as tape:
        predictions = model(images, training=True)
        loss = compute_loss(labels, predictions, model.losses)

    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    train_accuracy.update_state(labels, predictions)
    return loss


def test_step(inputs):
    images, labels = inputs

    predictions = model(images, training=False)
    t_loss = loss_object(labels, predictions)

    test_loss.update_state(t_loss)
    test_accuracy.update_state(labels, predictions)


@stratagem.function
def distributed_train_step(dataset_inputs):
    per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
    return strategy.reduce(stratagem.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


@stratagem.function
def distributed_test_step(dataset_inputs):
    return strategy.run(test_step, args=(dataset_inputs,))


for epoch in range(EPOCHS):
    total_loss = 0.0
    num_batches = 0
    for x in train_dist_dataset:
        total_loss += distributed_train_step(x)
        num_batches += 1
    train_loss = total_loss / num_batches

    for x in test_dist_dataset:
        distributed_test_step(x)

    accuracy = test_accuracy.result()
    print(
        f"Epoch {epoch + 1}, "
        f"Loss: {train_loss:.4f}, Accuracy: {train_accuracy.result() * 100:.2f}, "
        f"Test Loss: {test_loss.result():.4f}, Test Accuracy: {accuracy * 100:.2f}"
    )

    test_loss.reset_state()
    train_accuracy.reset_state()
    test_accuracy.reset_state()

assert accuracy > 0.9, f"Expected a test accuracy above 0.9. Got {accuracy}."
