"""The private names of Keras that Stratagem uses, and what it needs of each.

A test (tests/devices/test_private_names.py) fails when a new version of Keras moves or changes
one of them.
"""

from __future__ import annotations

# Keras 3 as `tf.keras` shows it. Needed: `losses.Reduction`, which programs of TensorFlow use and
# Keras' public names lack.
from keras._tf_keras import keras as tf_keras  # noqa: F401

# Shape inference. Needed: `compute_output_spec(fn, *args, **kwargs)`, looked up in this module.
from keras.src import backend as backend
from keras.src.backend.common import global_state as global_state

# Where Keras keeps the mask of a tensor. Needed: `get_keras_mask(x)`, `set_keras_mask(x, mask)`.
from keras.src.backend.common.masking import get_keras_mask as get_keras_mask
from keras.src.backend.common.masking import set_keras_mask as set_keras_mask

# The class behind keras.Variable on the JAX backend. Needed: `__init__`, `value`, `assign`,
# `assign_add`, `assign_sub`, `_direct_assign`, and the slots `_value` and `_dtype`. Shapes are
# inferred in a stateless scope that is symbolic, too; no value is needed there.
from keras.src.backend.common.stateless_scope import get_stateless_scope as get_stateless_scope
from keras.src.backend.common.stateless_scope import in_stateless_scope as in_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope as in_symbolic_scope
from keras.src.backend.jax.core import JaxVariable as JaxVariable

# The EpochIterator that this trainer makes. Needed: `_get_iterator()`, called for each pass through
# the data.
from keras.src.backend.jax.trainer import JAXEpochIterator as JAXEpochIterator

# The trainer mixed into keras.Model on the JAX backend. Needed: `make_train_function`,
# `make_test_function`, `make_predict_function`, `_make_function`, and the step methods
# `train_step(state, data)`, `test_step(state, data)`, `predict_step(state, data)`. For backups:
# `jax_state_sync()` and `_initial_epoch`, which `fit` reads after the callbacks' `on_train_begin`.
# With parameter servers: `_get_metrics_result_or_logs(logs)`, which `fit` calls with what the train
# function gave last, when an epoch's training is through, and `evaluate` with what its own did.
from keras.src.backend.jax.trainer import JAXTrainer as JAXTrainer

# The layer whose batch statistics `synchronized=True` makes global. Needed: `__init__`,
# `_moments(inputs, mask)`, `_reduction_axes`.
from keras.src.layers import BatchNormalization as BatchNormalization

# Needed of every layer: `add_weight`, `_flatten_layers(include_self, recursive)`.
from keras.src.layers.layer import Layer as Layer

# Where weighted losses are reduced. Needed: `reduce_values(values, sample_weight, reduction)` and
# `apply_mask(sample_weight, mask, dtype, reduction)`, looked up in this module by their callers.
from keras.src.losses import loss as loss_module  # noqa: F401

# Optimizers. Needed: `apply(grads, trainable_variables)` and `stateless_apply(...)`, which every
# optimizer goes through, and LossScaleOptimizer's own versions of both.
from keras.src.optimizers.base_optimizer import BaseOptimizer as BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer as LossScaleOptimizer

# Source of the random numbers of layers. Needed: `next(ordered)`; and of the global generator, its
# name among the global attributes, and the function that makes it.
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR as GLOBAL_SEED_GENERATOR
from keras.src.random.seed_generator import SeedGenerator as SeedGenerator
from keras.src.random.seed_generator import global_seed_generator as global_seed_generator

# Metrics that only hold others, which compile() makes. Needed: their class. (Of public metrics we
# read MeanMetricWrapper's `_fn` and `_fn_kwargs`, and where the update of a metric is defined.)
from keras.src.trainers.compile_utils import CompileMetrics, MetricsList

# Base class of inputs; `fit` takes an instance as it is. Needed: its methods and properties.
from keras.src.trainers.data_adapters.data_adapter import DataAdapter as DataAdapter

# Inputs of the user's own objects. Needed: `__init__(generator)` of the first, `get_jax_iterator()`
# of the others, from where a backup has Grain's iterator; `py_dataset`.
from keras.src.trainers.data_adapters.generator_data_adapter import (
    GeneratorDataAdapter as GeneratorDataAdapter,
)
from keras.src.trainers.data_adapters.grain_dataset_adapter import (
    GrainDatasetAdapter as GrainDatasetAdapter,
)
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter as PyDatasetAdapter
from keras.src.trainers.data_adapters.torch_data_loader_adapter import (
    TorchDataLoaderAdapter as TorchDataLoaderAdapter,
)

# What turns an input into the batches of epochs. Needed: `steps_per_epoch`, `steps_per_execution`,
# `data_adapter`, `_steps_seen`, `_interrupted_warning()`, `_enumerate_iterator()`, `__iter__()`.
from keras.src.trainers.epoch_iterator import EpochIterator as EpochIterator

METRIC_CONTAINERS = (CompileMetrics, MetricsList)
