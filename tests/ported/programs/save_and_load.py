"""The tutorial on saving and loading: trained under one strategy, used under another and none."""

import json
import os
import tempfile

import numpy as np
import tensorflow as tf

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
mirrored_strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])

rng = np.random.default_rng(0)
features = rng.normal(size=(128, 8)).astype("float32")
labels = (features.sum(axis=1) > 0).astype("int64")


def get_data():
    BATCH_SIZE = 16 * mirrored_strategy.num_replicas_in_sync
    train = tf.data.Dataset.from_tensor_slices((features[:96], labels[:96])).batch(BATCH_SIZE)
    test = tf.data.Dataset.from_tensor_slices((features[96:], labels[96:])).batch(BATCH_SIZE)
    return train, test


def get_model():
    with mirrored_strategy.scope():
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Input(shape=(8,)),
                tf.keras.layers.Dense(8, activation="relu"),
                tf.keras.layers.Dense(2),
            ]
        )
        weights = np.random.default_rng(1)
        model.set_weights([weights.normal(0, 0.3, w.shape) for w in model.get_weights()])
        model.compile(
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            optimizer=tf.keras.optimizers.Adam(0.01),
            metrics=[tf.keras.metrics.SparseCategoricalAccuracy()],
        )
        return model


model = get_model()
train_dataset, eval_dataset = get_data()
before = model.fit(train_dataset, epochs=2, verbose=0).history["loss"]

keras_model_path = os.path.join(tempfile.mkdtemp(), "keras_save.keras")
model.save(keras_model_path)

# Without a strategy.
restored_keras_model = tf.keras.models.load_model(keras_model_path)
without = restored_keras_model.fit(train_dataset, epochs=2, verbose=0).history["loss"]

# Under another strategy.
another_strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
with another_strategy.scope():
    restored_keras_model_ds = tf.keras.models.load_model(keras_model_path)
    one_device = restored_keras_model_ds.fit(train_dataset, epochs=2, verbose=0).history["loss"]

# Distributed predictions of the loaded model, with a loop of one's own.
predict_dataset = eval_dataset.map(lambda image, label: image)
with another_strategy.scope():
    loaded = tf.keras.models.load_model(keras_model_path)

    @tf.function
    def distributed_predict(batch):
        return another_strategy.run(lambda x: loaded(x, training=False), args=(batch,))

    predictions = []
    for batch in another_strategy.experimental_distribute_dataset(predict_dataset):
        predictions.append(distributed_predict(batch).numpy())

# Weights alone.
weights_path = os.path.join(tempfile.mkdtemp(), "kept.weights.h5")
model.save_weights(weights_path)
fresh = get_model()
fresh.load_weights(weights_path)

print(
    "RESULT",
    json.dumps(
        {
            "before": before,
            "without a strategy": without,
            "one device": one_device,
            "predictions": np.concatenate(predictions).tolist(),
            "weights alone": fresh.evaluate(eval_dataset, verbose=0),
        }
    ),
)
