"""Distribution strategies for Keras 3 on JAX, in the vocabulary of tf.distribute."""

from __future__ import annotations

import contextlib as _contextlib
import gc as _gc
import sys as _sys

_gc_was_enabled = _gc.isenabled()
with _contextlib.ExitStack() as _after_imports:
    # Modules stay: no time goes into looking for garbage among them, now (a sixth of the import's
    # time) or at any later collection.
    _gc.disable()
    if _gc_was_enabled:
        _after_imports.callback(_gc.enable)
    _after_imports.callback(_gc.freeze)

    from stratagem import config as config  # first, since it chooses Keras' backend

    # isort: split
    from stratagem import callbacks as callbacks
    from stratagem import cluster_resolver as cluster_resolver
    from stratagem import context as _context
    from stratagem import coordinator as coordinator
    from stratagem import data as data
    from stratagem import debug as debug
    from stratagem import errors as errors
    from stratagem import experimental as experimental
    from stratagem import keras_bridge as _keras_bridge
    from stratagem import nn as nn
    from stratagem import tpu as tpu
    from stratagem import train as train
    from stratagem import utils as utils
    from stratagem.collectives import CrossDeviceOps as CrossDeviceOps
    from stratagem.collectives import DoublingAllReduce as DoublingAllReduce
    from stratagem.collectives import HierarchicalCopyAllReduce as HierarchicalCopyAllReduce
    from stratagem.collectives import NcclAllReduce as NcclAllReduce
    from stratagem.collectives import ReductionToOneDevice as ReductionToOneDevice
    from stratagem.collectives import RingAllReduce as RingAllReduce
    from stratagem.collectives import TreeAllReduce as TreeAllReduce
    from stratagem.context import experimental_set_strategy as experimental_set_strategy
    from stratagem.context import get_replica_context as get_replica_context
    from stratagem.context import get_strategy as get_strategy
    from stratagem.context import has_strategy as has_strategy
    from stratagem.context import in_cross_replica_context as in_cross_replica_context
    from stratagem.coordinator.server import Server as Server
    from stratagem.data import DistributedDataset as DistributedDataset
    from stratagem.data import DistributedIterator as DistributedIterator
    from stratagem.data import InputContext as InputContext
    from stratagem.data import InputOptions as InputOptions
    from stratagem.data import InputReplicationMode as InputReplicationMode
    from stratagem.function import function as function
    from stratagem.keras_bridge.dynamic_table import DynamicTable as DynamicTable
    from stratagem.step.replica import ReplicaContext as ReplicaContext
    from stratagem.step.tape import GradientTape as GradientTape
    from stratagem.step.tape import value_and_grad as value_and_grad
    from stratagem.strategies import DefaultStrategy as _DefaultStrategy
    from stratagem.strategies import MirroredStrategy as MirroredStrategy
    from stratagem.strategies import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
    from stratagem.strategies import OneDeviceStrategy as OneDeviceStrategy
    from stratagem.strategies import ParameterServerStrategy as ParameterServerStrategy
    from stratagem.strategies import RunOptions as RunOptions
    from stratagem.strategies import Strategy as Strategy
    from stratagem.strategies import TPUStrategy as TPUStrategy
    from stratagem.values import DistributedValues as DistributedValues
    from stratagem.values import IndexedSlices as IndexedSlices
    from stratagem.values import Mirrored as Mirrored
    from stratagem.values import PerReplica as PerReplica
    from stratagem.values import ReduceOp as ReduceOp
    from stratagem.variables import VariableAggregation as VariableAggregation
    from stratagem.variables import VariableSynchronization as VariableSynchronization

_keras_bridge.install()

_default_strategy = _DefaultStrategy()
_context.set_default(_context.Frame(_default_strategy, replica=_default_strategy.replica_context))

# `stratagem.distribute` is the package itself, under the name that users of tf.distribute look for.
distribute = _sys.modules[__name__]
_sys.modules[__name__ + ".distribute"] = distribute
