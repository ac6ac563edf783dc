"""The `tf`-shaped namespace: `from stratagem.compat import tensorflow as tf`.

A program written for tf.distribute runs with this line in place of `import tensorflow as tf`.
What differs is told in docs/porting-from-tensorflow.md. A name that is not here raises an
AttributeError that says what to use.
"""

from __future__ import annotations

import enum as _enum
import logging as _logging
import sys as _sys
from typing import NoReturn as _NoReturn

import jax as _jax
import keras as _keras_3
import numpy as _np

import stratagem as _stratagem
from stratagem import _keras
from stratagem.compat import arrays as _arrays
from stratagem.compat import config as _config
from stratagem.compat import control as _control
from stratagem.compat import dataset_options as _options
from stratagem.compat import distribute as _distribute
from stratagem.compat import math as _math
from stratagem.compat import nn as _nn
from stratagem.compat import random as _random
from stratagem.compat import tensors as _tensors
from stratagem.compat.dataset import Dataset as _Dataset
from stratagem.compat.function import function as function
from stratagem.compat.namespace import Namespace as _Namespace
from stratagem.compat.namespace import refuse as _refuse
from stratagem.compat.variables import Module as Module
from stratagem.compat.variables import Variable as Variable

_tensors.give_arrays_numpy()


class UnconnectedGradients(_enum.StrEnum):
    """What a gradient is where the target does not depend on the source."""

    NONE = "none"
    ZERO = "zero"


# TensorFlow's version whose names and behaviour these are.
__version__ = "2.21.0+stratagem"
version = _Namespace("version", {"VERSION": __version__})

# Tensors.
Tensor = _jax.Array
IndexedSlices = _stratagem.IndexedSlices
TensorSpec = _tensors.TensorSpec
constant = _tensors.constant
convert_to_tensor = _tensors.convert_to_tensor
cast = _tensors.cast
is_tensor = _tensors.is_tensor
as_dtype = _tensors.as_dtype
DType = _np.dtype
dtypes = _Namespace("dtypes", {**_tensors.DTYPES, "DType": DType, "cast": cast})
globals().update(_tensors.DTYPES)
globals().update(_arrays.NAMES)
globals().update(_math.SHARED)
globals().update(_math.TOP)
math = _Namespace("math", {**_math.SHARED, **_math.MATH, "top_k": _nn.top_k})
linalg = _Namespace("linalg", _math.LINALG)
nn = _Namespace("nn", _nn.NAMES)
random = _Namespace("random", _random.NAMES)
nest = _Namespace(
    "nest",
    {
        "map_structure": _keras_3.tree.map_structure,
        "flatten": _keras_3.tree.flatten,
        "pack_sequence_as": _keras_3.tree.pack_sequence_as,
        "assert_same_structure": _keras_3.tree.assert_same_structure,
    },
)

# Programs.
GradientTape = _stratagem.GradientTape
VariableAggregation = _stratagem.VariableAggregation
VariableSynchronization = _stratagem.VariableSynchronization
cond = _control.cond
while_loop = _control.while_loop
map_fn = _control.map_fn
print = _control.print_
device = _control.device
executing_eagerly = _control.executing_eagerly
debugging = _Namespace("debugging", _control.DEBUGGING)

# Input.
_AutoShardPolicy = _stratagem.data.AutoShardPolicy
data = _Namespace(
    "data",
    {
        "Dataset": _Dataset,
        "Options": _options.Options,
        "AUTOTUNE": _options.AUTOTUNE,
        "INFINITE_CARDINALITY": _options.INFINITE_CARDINALITY,
        "UNKNOWN_CARDINALITY": _options.UNKNOWN_CARDINALITY,
        "experimental": _Namespace(
            "data.experimental",
            {
                "AutoShardPolicy": _AutoShardPolicy,
                "DistributeOptions": _options.DistributeOptions,
                "AUTOTUNE": _options.AUTOTUNE,
                "INFINITE_CARDINALITY": _options.INFINITE_CARDINALITY,
                "UNKNOWN_CARDINALITY": _options.UNKNOWN_CARDINALITY,
            },
        ),
    },
)

# Keras 3, with the names of Keras 2 that it keeps for programs of TensorFlow.
keras = _keras.tf_keras
_distribute.add_to(keras)

# Distribution.
distribute = _distribute.NAMESPACE
config = _config.NAMESPACE
tpu = _distribute.TPU
train = _distribute.TRAIN
types = _distribute.TYPES
errors = _distribute.ERRORS

# So that `from stratagem.compat.tensorflow.keras import layers` finds Keras and not a copy.
_sys.modules[__name__ + ".keras"] = keras


def get_logger() -> _logging.Logger:
    """The logger of this package."""
    return _logging.getLogger("stratagem")


def __getattr__(name: str) -> _NoReturn:
    if name.startswith("__"):  # what Python itself asks modules for
        raise AttributeError(name)
    _refuse(name)
