"""The tutorial on multi-worker training with Keras. Each worker runs it, with its own TF_CONFIG."""

import json
import os

import numpy as np
import tensorflow as tf

per_worker_batch_size = 8
tf_config = json.loads(os.environ["TF_CONFIG"])
num_workers = len(tf_config["cluster"]["worker"])

strategy = tf.distribute.MultiWorkerMirroredStrategy()


def dataset(batch_size):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (96, 36)) / np.float32(255)
    y = (x[:, :18].sum(axis=1) > x[:, 18:].sum(axis=1)).astype(np.int64)
    return tf.data.Dataset.from_tensor_slices((x.astype("float32"), y)).batch(batch_size)


def build_and_compile_model():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.InputLayer((36,)),
            tf.keras.layers.Dense(16, activation="relu"),
            tf.keras.layers.Dense(2),
        ]
    )
    weights = np.random.default_rng(1)
    model.set_weights([weights.normal(0, 0.2, w.shape) for w in model.get_weights()])
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.SGD(learning_rate=0.1),
        metrics=["accuracy"],
    )
    return model


# The number of workers times the batch size of each is the global one.
global_batch_size = per_worker_batch_size * num_workers
multi_worker_dataset = dataset(global_batch_size)

# The workers share the rows of each batch, not files.
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
multi_worker_dataset = multi_worker_dataset.with_options(options)

with strategy.scope():
    multi_worker_model = build_and_compile_model()

history = multi_worker_model.fit(multi_worker_dataset, epochs=3, steps_per_epoch=6, verbose=0)

print(
    "RESULT",
    json.dumps(
        {
            "replicas": strategy.num_replicas_in_sync,
            "task": strategy.cluster_resolver.task_type,
            "loss": history.history["loss"],
            "accuracy": history.history["accuracy"],
            "bias": multi_worker_model.get_weights()[-1].tolist(),
        }
    ),
)
