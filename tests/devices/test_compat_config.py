"""tf.config: what can be asked in a process that has started, and in one that has not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from stratagem import config as own
from stratagem.compat import tensorflow as tf

GPU = own.PhysicalDevice("/physical_device:GPU:0", "GPU")


def test_listing():
    (cpu,) = tf.config.list_physical_devices("CPU")
    assert cpu == ("/physical_device:CPU:0", "CPU")
    assert tf.config.list_physical_devices() == [cpu]
    assert tf.config.list_physical_devices("GPU") == tf.config.get_visible_devices("GPU") == []
    assert [d.name for d in tf.config.list_logical_devices("CPU")[:2]] == [
        "/device:CPU:0",
        "/device:CPU:1",
    ]


def test_the_number_of_devices_cannot_change_any_more():
    (cpu,) = tf.config.list_physical_devices("CPU")
    with pytest.raises(RuntimeError, match="the JAX backend has already started"):
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()])
    eight = [tf.config.LogicalDeviceConfiguration(memory_limit=99)] * 8
    tf.config.set_logical_device_configuration(cpu, eight)
    assert tf.config.get_logical_device_configuration(cpu) == eight
    assert tf.config.get_logical_device_configuration(GPU) is None


def test_virtual_gpus_are_refused():
    with pytest.raises(
        NotImplementedError, match="JAX has no virtual GPUs.*STRATAGEM_REHEARSE=gpu:2"
    ):
        tf.config.set_logical_device_configuration(
            GPU, [tf.config.LogicalDeviceConfiguration()] * 2
        )


def test_visible_devices():
    tf.config.set_visible_devices([], "GPU")  # there are none to hide
    tf.config.set_visible_devices(tf.config.list_physical_devices("CPU"), "CPU")
    with pytest.raises(NotImplementedError, match=r"Expected GPUs.*Got devices of \['TPU'\]"):
        tf.config.set_visible_devices([], "TPU")
    with pytest.raises(RuntimeError, match="the JAX backend has already started"):
        tf.config.set_visible_devices(GPU, "GPU")


def test_memory_growth_warns(caplog):
    tf.config.experimental.set_memory_growth(GPU, False)
    assert not caplog.records
    tf.config.experimental.set_memory_growth(GPU, True)
    assert "XLA_PYTHON_CLIENT_PREALLOCATE=false" in caplog.text


def test_functions_stay_compiled():
    tf.config.run_functions_eagerly(False)
    with pytest.raises(NotImplementedError, match=r"Got run_functions_eagerly\(True\)"):
        tf.config.run_functions_eagerly(True)


PROGRAM = """
from stratagem.compat import tensorflow as tf
from stratagem import _jax
cpus = tf.config.list_physical_devices("CPU")
assert not _jax.started_backends(), "importing the namespace and asking for the CPU start nothing"
tf.config.set_logical_device_configuration(cpus[0], [tf.config.LogicalDeviceConfiguration()] * 3)
strategy = tf.distribute.MirroredStrategy()
print(strategy.num_replicas_in_sync, [d.name for d in tf.config.list_logical_devices()])
"""


@pytest.mark.processes
def test_at_the_start_of_a_program():
    chosen_here = {"NPROC", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "STRATAGEM_REHEARSE"}
    inherited = {name: text for name, text in os.environ.items() if name not in chosen_here}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=inherited | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3 ['/device:CPU:0', '/device:CPU:1', '/device:CPU:2']\n"
