"""TensorFlow on two logical CPU devices. Runs in the peer environment."""

from __future__ import annotations

import importlib
from typing import Any

import problems
import tensorflow as tf


def keras(name: str) -> Any:
    """Keras 3 ("keras"), or Keras 2 ("tf_keras"), for which tf.distribute was made."""
    return importlib.import_module(name)


def strategy() -> Any:
    """MirroredStrategy on logical CPU devices."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    parts = [tf.config.LogicalDeviceConfiguration() for _ in range(problems.REPLICAS)]
    tf.config.set_logical_device_configuration(cpu, parts)
    devices = [f"/cpu:{i}" for i in range(problems.REPLICAS)]
    return tf.distribute.MirroredStrategy(devices)


def versions(module: Any) -> dict[str, str]:
    return {"tensorflow": tf.__version__, module.__name__: module.__version__}
