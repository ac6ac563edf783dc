"""The guide to distributed training: fit under MirroredStrategy, then the loop by hand."""

import json

import numpy as np
import tensorflow as tf

cpus = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(
    cpus[0], [tf.config.LogicalDeviceConfiguration(), tf.config.LogicalDeviceConfiguration()]
)
mirrored_strategy = tf.distribute.MirroredStrategy(devices=["/cpu:0", "/cpu:1"])

# With Model.fit.

with mirrored_strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input(shape=(1,)),
            tf.keras.layers.Dense(
                1,
                kernel_initializer=tf.keras.initializers.Constant(0.5),
                kernel_regularizer=tf.keras.regularizers.L2(1e-4),
            ),
        ]
    )
    model.compile(loss="mse", optimizer="sgd")

dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(10)
history = model.fit(dataset, epochs=2, verbose=0)
evaluated = model.evaluate(dataset, verbose=0)

inputs, targets = np.ones((100, 1)), np.ones((100, 1))
array_history = model.fit(inputs, targets, epochs=2, batch_size=10, verbose=0)

BATCH_SIZE_PER_REPLICA = 5
global_batch_size = BATCH_SIZE_PER_REPLICA * mirrored_strategy.num_replicas_in_sync
dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100)
dataset = dataset.batch(global_batch_size)
LEARNING_RATES_BY_BATCH_SIZE = {5: 0.1, 10: 0.15, 20: 0.175}
learning_rate = LEARNING_RATES_BY_BATCH_SIZE[global_batch_size]

# With a custom training loop.

with mirrored_strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input(shape=(1,)),
            tf.keras.layers.Dense(
                1,
                kernel_initializer=tf.keras.initializers.Constant(0.5),
                kernel_regularizer=tf.keras.regularizers.L2(1e-4),
            ),
        ]
    )
    optimizer = tf.keras.optimizers.SGD(learning_rate)

dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(1000).batch(global_batch_size)
dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)

loss_object = tf.keras.losses.BinaryCrossentropy(
    from_logits=True, reduction=tf.keras.losses.Reduction.NONE
)


def train_step(inputs):
    features, labels = inputs

    with tf.GradientTape() as tape:
        predictions = model(features, training=True)
        per_example_loss = loss_object(labels, predictions)
        loss = tf.nn.compute_average_loss(per_example_loss)
        model_losses = model.losses
        if model_losses:
            loss += tf.nn.scale_regularization_loss(tf.add_n(model_losses))

    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


@tf.function
def distributed_train_step(dist_inputs):
    per_replica_losses = mirrored_strategy.run(train_step, args=(dist_inputs,))
    return mirrored_strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


losses = []
for dist_inputs in dist_dataset:
    losses.append(distributed_train_step(dist_inputs).numpy())

iterator = iter(dist_dataset)
for _ in range(10):
    losses.append(distributed_train_step(next(iterator)).numpy())

print(
    "RESULT",
    json.dumps(
        {
            "fit": history.history["loss"],
            "evaluate": evaluated,
            "fit on arrays": array_history.history["loss"],
            "losses": [float(loss) for loss in losses],
            "kernel": np.ravel(model.trainable_variables[0].numpy()).tolist(),
        }
    ),
)
