"""The tutorial on parameter server training: a cluster in this process, a custom loop."""

import json
import os
import socket

import numpy as np
import tensorflow as tf

NUM_WORKERS = 1  # with one, the order of the steps is known
NUM_PS = 2
VOCABULARY = 40


def create_in_process_cluster(num_workers, num_ps):
    """Creates and starts local servers and returns the cluster_resolver."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(num_workers + num_ps)]
    addresses = [f"localhost:{s.getsockname()[1]}" for s in sockets]
    for s in sockets:
        s.close()
    cluster_dict = {"worker": addresses[:num_workers], "ps": addresses[num_workers:]}
    cluster_spec = tf.train.ClusterSpec(cluster_dict)
    servers = [
        tf.distribute.Server(cluster_spec, job_name=job, task_index=i, protocol="grpc")
        for job, count in (("worker", num_workers), ("ps", num_ps))
        for i in range(count)
    ]
    cluster_resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster_spec, rpc_layer="grpc"
    )
    return cluster_resolver, servers


os.environ["GRPC_FAIL_FAST"] = "use_caller"
cluster_resolver, servers = create_in_process_cluster(NUM_WORKERS, NUM_PS)

variable_partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(
    min_shard_bytes=(1 << 10), max_shards=NUM_PS
)
strategy = tf.distribute.ParameterServerStrategy(
    cluster_resolver, variable_partitioner=variable_partitioner
)

# Which books somebody borrowed, in place of the tutorial's strings.
rng = np.random.default_rng(0)
features = rng.integers(0, VOCABULARY, size=(200, 3))
taste = rng.normal(size=VOCABULARY)
labels = (taste[features].sum(axis=1, keepdims=True) > 0).astype("int64")


def dataset_fn(_):
    dataset = tf.data.Dataset.from_tensor_slices((features.astype("int32"), labels))
    return dataset.batch(20).repeat()


with strategy.scope():
    model_input = tf.keras.layers.Input(shape=(3,), dtype="int32", name="features")
    emb_layer = tf.keras.layers.Embedding(
        input_dim=VOCABULARY,
        output_dim=16,
        embeddings_initializer=tf.keras.initializers.Constant(0.1),
    )
    emb_output = tf.keras.layers.GlobalAveragePooling1D()(emb_layer(model_input))
    dense_output = tf.keras.layers.Dense(
        units=1, activation="sigmoid", kernel_initializer=tf.keras.initializers.Constant(0.5)
    )(emb_output)
    model = tf.keras.Model({"features": model_input}, dense_output)
    optimizer = tf.keras.optimizers.Adagrad(learning_rate=0.3)
    accuracy = tf.keras.metrics.Accuracy()


@tf.function
def step_fn(iterator):
    def replica_fn(batch_data, labels):
        with tf.GradientTape() as tape:
            pred = model({"features": batch_data}, training=True)
            per_example_loss = tf.keras.losses.BinaryCrossentropy(
                reduction=tf.keras.losses.Reduction.NONE
            )(labels, pred)
            loss = tf.nn.compute_average_loss(per_example_loss)
        gradients = tape.gradient(loss, model.trainable_variables)

        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

        actual_pred = tf.cast(tf.greater(pred, 0.5), tf.int64)
        accuracy.update_state(labels, actual_pred)
        return loss

    batch_data, labels = next(iterator)
    losses = strategy.run(replica_fn, args=(batch_data, labels))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)


@tf.function
def per_worker_dataset_fn():
    return strategy.distribute_datasets_from_function(dataset_fn)


per_worker_dataset = coordinator.create_per_worker_dataset(per_worker_dataset_fn)
per_worker_iterator = iter(per_worker_dataset)

num_epochs = 3
steps_per_epoch = 10
accuracies = []
for _ in range(num_epochs):
    accuracy.reset_state()
    for _ in range(steps_per_epoch):
        coordinator.schedule(step_fn, args=(per_worker_iterator,))
    # Wait at epoch boundaries.
    coordinator.join()
    accuracies.append(float(accuracy.result().numpy()))

loss = coordinator.schedule(step_fn, args=(per_worker_iterator,))
final_loss = float(loss.fetch())

embeddings = emb_layer.embeddings
print(
    "RESULT",
    json.dumps(
        {
            "accuracies": accuracies,
            "final loss": final_loss,
            "shards": [list(shard.shape) for shard in embeddings.variables],
            "rows": [shard.numpy()[:2, 0].tolist() for shard in embeddings.variables],
            "iterations": int(optimizer.iterations.numpy()),
            "done": bool(coordinator.done()),
        }
    ),
    flush=True,
)
os._exit(0)  # TensorFlow's servers cannot be stopped
