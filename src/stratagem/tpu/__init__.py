"""The names TensorFlow keeps under tf.tpu."""

from __future__ import annotations

from stratagem.tpu import experimental as experimental
from stratagem.tpu.options import XLAOptions as XLAOptions
