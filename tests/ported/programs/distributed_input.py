"""The tutorial on distributed input: whose rows go where, and the ways to loop over them."""

import json

import numpy as np
import tensorflow as tf

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
mirrored_strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
result = {}


def parts(value):
    return [np.asarray(v).tolist() for v in mirrored_strategy.experimental_local_results(value)]


# experimental_distribute_dataset splits each global batch.
global_batch_size = 4
dataset = tf.data.Dataset.range(14).batch(global_batch_size)
dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)
result["split"] = [parts(x) for x in dist_dataset]

# A shard policy, by the dataset's options.
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
with_policy = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(8).batch(4).with_options(options)
dist_dataset = mirrored_strategy.experimental_distribute_dataset(with_policy)
result["with options"] = [[parts(x), parts(y)] for x, y in dist_dataset]


# distribute_datasets_from_function leaves batches as they are.
def dataset_fn(input_context):
    batch_size = input_context.get_per_replica_batch_size(global_batch_size)
    dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(64).batch(16)
    dataset = tf.data.Dataset.range(24)
    dataset = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    dataset = dataset.batch(batch_size)
    dataset = dataset.prefetch(2)
    return dataset


from_function = mirrored_strategy.distribute_datasets_from_function(dataset_fn)
result["from function"] = [parts(x) for x in from_function]

# A for loop over the dataset, in tf.function or not.
x = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(10)
train_dataset = mirrored_strategy.experimental_distribute_dataset(x)


@tf.function
def train_step(inputs):
    features, labels = inputs
    return labels - 0.3 * features


losses = []
for x in train_dataset:
    loss = mirrored_strategy.run(train_step, args=(x,))
    losses.append(mirrored_strategy.reduce("SUM", loss, axis=0).numpy().tolist())
result["for loop"] = losses


# An iterator with a number of steps, passed to a tf.function.
num_epochs = 2
steps_per_epoch = 5


@tf.function
def distributed_train_step(iterator):
    def replica_fn(inputs):
        features, labels = inputs
        return labels - 0.3 * features

    per_replica = mirrored_strategy.run(replica_fn, args=(next(iterator),))
    return mirrored_strategy.reduce(tf.distribute.ReduceOp.MEAN, per_replica, axis=0)


means = []
for _ in range(num_epochs):
    train_iterator = iter(train_dataset)
    for _ in range(steps_per_epoch):
        means.append(distributed_train_step(train_iterator).numpy().tolist())
result["iterator"] = means


# Several steps in one tf.function.
@tf.function
def several_steps(iterator, total):
    def replica_fn(inputs):
        features, labels = inputs
        return tf.reduce_sum(labels - 0.3 * features)

    for _ in tf.range(3):
        per_replica = mirrored_strategy.run(replica_fn, args=(next(iterator),))
        total += mirrored_strategy.reduce("SUM", per_replica, axis=None)
    return total


result["several steps"] = float(several_steps(iter(train_dataset), tf.constant(0.0)).numpy())

# Elements until there are no more, by get_next_as_optional.
numbers = tf.data.Dataset.range(10).batch(2)
iterator = iter(mirrored_strategy.experimental_distribute_dataset(numbers))
sums = []
while True:
    optional = iterator.get_next_as_optional()
    if not bool(optional.has_value()):
        break
    per_replica = mirrored_strategy.run(lambda x: x * 2, args=(optional.get_value(),))
    sums.append(int(mirrored_strategy.reduce("SUM", per_replica, axis=0).numpy()))
result["optional"] = sums

# element_spec, to trace a function for it.
spec = mirrored_strategy.experimental_distribute_dataset(
    tf.data.Dataset.from_tensors(([1.0, 2.0], [1.0])).repeat(8).batch(4, drop_remainder=True)
).element_spec
result["spec"] = len(spec)


# Values of one's own for each replica.
def value_fn(ctx):
    return tf.constant(float(ctx.replica_id_in_sync_group))


distributed_values = mirrored_strategy.experimental_distribute_values_from_function(value_fn)
doubled = mirrored_strategy.run(lambda x: x * 2, args=(distributed_values,))
result["values"] = parts(doubled)


# A generator, whose data the replicas share.
def generator():
    for i in range(9):
        yield [float(i)], [i % 2]


from_generator = tf.data.Dataset.from_generator(
    generator,
    output_signature=(
        tf.TensorSpec(shape=(1,), dtype=tf.float32),
        tf.TensorSpec(shape=(1,), dtype=tf.int32),
    ),
).batch(4)
total = 0.0
for features, labels in mirrored_strategy.experimental_distribute_dataset(from_generator):
    per_replica = mirrored_strategy.run(
        lambda x, y: tf.reduce_sum(x * tf.cast(y, tf.float32)), args=(features, labels)
    )
    total += mirrored_strategy.reduce("SUM", per_replica, axis=None)
result["generator"] = float(total)

print("RESULT", json.dumps(result))
