"""Names that TensorFlow keeps under tf.distribute.experimental."""

from __future__ import annotations

from stratagem.data import ValueContext as ValueContext
