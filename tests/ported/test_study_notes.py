"""The snippets of the two study notes, verbatim but for the import.

Each is a program of its own, since strategies choose the devices of a process when it starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

HEAD = """
import json, os
from stratagem.compat import tensorflow as tf
from stratagem.compat.tensorflow.keras import layers
"""

MODEL = """
with strategy.scope():
    model = tf.keras.Sequential(); model.add(layers.Dense(16, activation='relu', input_shape=(10,))); model.add(layers.Dense(1))
    optimizer = tf.keras.optimizers.SGD(0.2)
    model.compile(loss=tf.keras.losses.BinaryCrossentropy(from_logits=True), optimizer=optimizer)
model.summary()
"""  # noqa: E501

FIT = """
import numpy as np
x = np.random.default_rng(0).normal(size=(64, 10)).astype("float32")
history = model.fit(x, (x.sum(1, keepdims=True) > 0).astype("float32"), epochs=3, verbose=0)
assert history.history["loss"][-1] < history.history["loss"][0]
print("RESULT", strategy.num_replicas_in_sync)
"""

# Note A tells how the default strategy behaves.
NOTE_A = """
assert not tf.distribute.has_strategy()
strategy = tf.distribute.get_strategy()
try:
    type(strategy)()
except RuntimeError as error:
    assert "There is one instance" in str(error)
"""

# Note B: the program's text, and the devices that it is rehearsed on.
NOTE_B = {
    "mirrored": ("gpu:2", "strategy = tf.distribute.MirroredStrategy()", 2),
    "mirrored devices": (
        "gpu:2",
        'strategy = tf.distribute.MirroredStrategy(devices=["/gpu:0", "/gpu:1"])',
        2,
    ),
    "mirrored ops": (
        "gpu:2",
        "strategy = tf.distribute.MirroredStrategy("
        "cross_device_ops=tf.distribute.HierarchicalCopyAllReduce())",
        2,
    ),
    "central storage": (
        "gpu:2",
        "strategy = tf.distribute.experimental.CentralStorageStrategy()",
        2,
    ),
    "multi-worker": (
        "cpu:1",
        "strategy = tf.distribute.experimental.MultiWorkerMirroredStrategy("
        "tf.distribute.experimental.CollectiveCommunication.NCCL)",
        1,
    ),
    "tpu": (
        "tpu:2",
        'tpu_address = ""\n'
        "resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=tpu_address)\n"
        "tf.config.experimental_connect_to_cluster(resolver); "
        "tf.tpu.experimental.initialize_tpu_system(resolver)\n"
        "strategy = tf.distribute.experimental.TPUStrategy(resolver)",
        2,
    ),
    "one device": ("gpu:1", 'strategy = tf.distribute.OneDeviceStrategy(device="/gpu:0")', 1),
}


def execute(program: str, rehearse: str) -> subprocess.CompletedProcess[str]:
    chosen_here = {"NPROC", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "TF_CONFIG"}
    inherited = {name: text for name, text in os.environ.items() if name not in chosen_here}
    return subprocess.run(
        [sys.executable, "-c", HEAD + program],
        env=inherited | {"JAX_PLATFORMS": "cpu", "STRATAGEM_REHEARSE": rehearse},
        capture_output=True,
        text=True,
        timeout=110,
    )


def test_note_a_the_default_strategy():
    done = execute(NOTE_A + MODEL + FIT, "cpu:1")
    assert done.returncode == 0, done.stderr
    assert "RESULT 1" in done.stdout


@pytest.mark.parametrize("name", NOTE_B)
def test_note_b(name):
    rehearse, text, replicas = NOTE_B[name]
    done = execute(text + MODEL + FIT, rehearse)
    assert done.returncode == 0, done.stderr
    assert "Total params: 193" in done.stdout
    assert f"RESULT {replicas}" in done.stdout


def test_note_b_the_environment_of_a_cluster():
    """The note's TF_CONFIG, with addresses in place of `host1:port`, is read as it is."""
    done = execute(
        """
os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": ["host1:1", "host2:1", "host3:1"], "ps": ["host4:1", "host5:1"]}, "task": {"type": "worker", "index": 1}})
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
spec = resolver.cluster_spec()
print("RESULT", json.dumps([spec.num_tasks("worker"), spec.num_tasks("ps"), resolver.task_type, resolver.task_id]))
""",  # noqa: E501
        "cpu:1",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.removeprefix("RESULT ")) == [3, 2, "worker", 1]
