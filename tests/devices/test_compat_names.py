"""The `tf` namespace: what is there, where what is not there is, and `.numpy()`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem
from stratagem.compat import tensorflow as tf
from stratagem.compat.hints import HINTS
from stratagem.compat.namespace import MISSING, Namespace, first_of
from stratagem.errors import ReplicaBranchError


def look_up(path: str):
    value = tf
    for part in path.split("."):
        value = getattr(value, part)
    return value


# Names that the guides and tutorials of tf.distribute use.
USED = """
distribute.MirroredStrategy distribute.MultiWorkerMirroredStrategy distribute.OneDeviceStrategy
distribute.TPUStrategy distribute.Strategy distribute.get_strategy distribute.has_strategy
distribute.get_replica_context distribute.in_cross_replica_context distribute.ReplicaContext
distribute.experimental_set_strategy distribute.ReduceOp.SUM distribute.CrossDeviceOps
distribute.ReductionToOneDevice distribute.NcclAllReduce distribute.HierarchicalCopyAllReduce
distribute.InputContext distribute.InputOptions distribute.InputReplicationMode
distribute.DistributedValues distribute.DistributedDataset distribute.DistributedIterator
distribute.experimental.ValueContext distribute.experimental.MultiWorkerMirroredStrategy
distribute.experimental.TPUStrategy distribute.cluster_resolver.TFConfigClusterResolver
distribute.cluster_resolver.SimpleClusterResolver distribute.cluster_resolver.TPUClusterResolver
config.list_physical_devices config.list_logical_devices config.LogicalDeviceConfiguration
config.set_logical_device_configuration config.experimental_connect_to_cluster
config.experimental.set_memory_growth tpu.experimental.initialize_tpu_system
keras.Sequential keras.losses.Reduction.NONE keras.optimizers.SGD keras.layers.Dense
GradientTape function Variable VariableAggregation.SUM VariableSynchronization.ON_READ Module
nn.compute_average_loss nn.scale_regularization_loss nn.softmax nn.relu nn.embedding_lookup
math.log math.reduce_std reduce_sum reduce_mean add_n cast constant range matmul float32 int64
dtypes.int64 random.normal random.set_seed train.Checkpoint train.CheckpointManager
train.ClusterSpec train.latest_checkpoint data.Dataset.from_tensor_slices data.AUTOTUNE
data.experimental.AutoShardPolicy.DATA data.Options TensorSpec Tensor IndexedSlices
types.experimental.distributed.PerReplica errors.OutOfRangeError print debugging.assert_equal
distribute.ParameterServerStrategy distribute.experimental.ParameterServerStrategy
distribute.Server distribute.coordinator.ClusterCoordinator distribute.coordinator.RemoteValue
distribute.coordinator.PerWorkerValue distribute.experimental.coordinator.ClusterCoordinator
distribute.coordinator.experimental_get_current_worker_index nn.embedding_lookup_sparse
distribute.experimental.partitioners.FixedShardsPartitioner
distribute.experimental.partitioners.MinSizePartitioner
distribute.experimental.partitioners.MaxSizePartitioner
distribute.experimental.CentralStorageStrategy keras.utils.experimental.DatasetCreator
keras.utils.SidecarEvaluator keras.callbacks.SidecarEvaluatorModelExport
""".split()


@pytest.mark.parametrize("path", USED)
def test_names_that_programs_use(path):
    assert look_up(path) is not None


def test_names_are_the_packages_own():
    assert tf.distribute.MirroredStrategy is stratagem.MirroredStrategy
    assert tf.keras.layers.Dense is keras.layers.Dense
    assert tf.GradientTape is stratagem.GradientTape
    assert tf.train.ClusterSpec is stratagem.cluster_resolver.ClusterSpec
    assert tf.distribute.Server is stratagem.Server
    assert tf.keras.utils.experimental.DatasetCreator is stratagem.utils.DatasetCreator
    assert tf.keras.utils.SidecarEvaluator is stratagem.utils.SidecarEvaluator


def test_imports_of_keras_from_tensorflow():
    from stratagem.compat.tensorflow.keras import layers
    from stratagem.compat.tensorflow.keras.layers import Dense

    from stratagem.compat.tensorflow import keras as theirs

    assert theirs is tf.keras
    assert layers.Dense is Dense is keras.layers.Dense


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("estimator.Estimator", "Use tf.keras.Model and fit."),
        ("nn.ctc_loss", "Use keras.ops.ctc_loss."),
        ("math.bincount", "Use keras.ops.bincount."),
        ("reduce_average", "Use keras.ops.average."),
        ("unravel_index", "Use keras.ops.unravel_index."),
        ("polyval", "Use jax.numpy.polyval."),
        ("nn.celu_of_nobody", "Look for it in keras.ops, jax.numpy, jax.lax or jax.nn."),
        ("io.gfile.exists", "Use pathlib"),
        ("io.parse_example", "for TFRecords"),
        ("data.TFRecordDataset", "TFRecordIterDataset"),
        ("data.Dataset.list_files", "tf.data.Dataset with another method"),
        ("train.Example", "such as tfrecord"),
        ("Session", "there are no sessions"),
        ("compat.v1.Session", "Port the program to TensorFlow 2"),
        ("config.threading", "XLA_FLAGS"),
        ("config.set_soft_device_placement", "Leave it out"),
        ("config.functions_run_eagerly", "Use jax.config, or stratagem.config"),
        ("distribute.StrategyExtended", "`strategy.extended` has its methods"),
        ("math.reduce_euclidean_norm", "keras.ops.norm"),
    ],
)
def test_what_is_missing_says_what_to_use(path, hint):
    with pytest.raises(
        AttributeError, match="Expected a name of TensorFlow that Stratagem has"
    ) as e:
        look_up(path)
    assert hint in str(e.value)
    assert str(e.value).startswith(
        "Expected a name of TensorFlow that Stratagem has. Got tf." + path.split(".")[0]
    )


def test_names_appear_when_the_package_gets_them(monkeypatch):
    made = object()
    monkeypatch.setattr(stratagem, "Brandnew", made, raising=False)
    assert tf.distribute.Brandnew is made
    here = Namespace("part", {}, first_of(stratagem))
    assert here.Brandnew is made
    assert first_of(stratagem)("_keras_bridge") is MISSING


def test_hasattr_is_answered():
    assert not hasattr(tf, "contrib")
    assert not hasattr(tf.distribute, "__path__")
    assert "reduce_std" in dir(tf.math)


def test_hints_are_for_names_that_are_missing():
    """A hint for what is there would never be read."""
    for name in HINTS:
        *path, last = name.split(".")
        holder = look_up(".".join(path)) if path and hasattr(tf, path[0]) else tf
        if hasattr(holder, last):  # then it is the answer for names below
            assert isinstance(look_up(name), Namespace), name


def test_arrays_have_numpy():
    value = tf.reduce_sum(tf.constant([1.0, 2.0])).numpy()
    assert isinstance(value, np.ndarray)
    assert value == 3.0
    assert jnp.zeros(2).numpy().tolist() == [0.0, 0.0]


def test_numpy_of_a_traced_value_is_explained():
    two = stratagem.MirroredStrategy(["cpu:0", "cpu:1"])
    with pytest.raises(ReplicaBranchError, match=r"\.numpy\(\)"):
        two.run(lambda x: x.numpy(), (jnp.ones(2),))


def test_a_numpy_of_jaxs_own_is_left_alone(monkeypatch):
    from stratagem.compat import tensors

    own = object()
    monkeypatch.setattr(jax.Array, "numpy", own)
    tensors.give_arrays_numpy()
    assert jax.Array.numpy is own


def test_version_says_whose_names_these_are():
    assert tf.__version__ == tf.version.VERSION == "2.21.0+stratagem"
    assert tf.executing_eagerly()
    assert tf.get_logger().name == "stratagem"
