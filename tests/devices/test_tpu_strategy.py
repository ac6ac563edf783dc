"""TPUStrategy on virtual devices: how it is made, its extras, and its errors."""

from __future__ import annotations

from unittest import mock

import keras
import numpy as np
import pytest

import stratagem
from stratagem import config
from stratagem.cluster_resolver import TPUClusterResolver
from stratagem.compat import tensorflow as tf
from stratagem.tpu.experimental import (
    DeviceAssignment,
    initialize_tpu_system,
    shutdown_tpu_system,
)


@pytest.fixture
def four_cores():
    """As STRATAGEM_REHEARSE=tpu:4."""
    with mock.patch.object(config, "_rehearsal", config._Rehearsal("tpu", 4)):
        yield


@pytest.fixture
def strategy(four_cores):
    return stratagem.TPUStrategy(TPUClusterResolver("local"))


def test_the_calls_of_a_script_for_tpus(four_cores):
    resolver = TPUClusterResolver(tpu="grpc://10.0.0.2:8470")
    config.experimental_connect_to_cluster(resolver)
    topology = initialize_tpu_system(resolver)
    assert topology.mesh_shape.tolist() == [4, 1, 1, 1]
    strategy = stratagem.TPUStrategy(resolver)
    assert strategy.num_replicas_in_sync == 4
    assert strategy.worker_devices == tuple(f"/device:TPU:{i}" for i in range(4))
    assert strategy.cluster_resolver is resolver
    assert resolver.num_accelerators() == {"TPU": 4}
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    history = model.fit(np.ones((10, 3)), np.ones((10, 1)), batch_size=5, verbose=0)
    assert np.isfinite(history.history["loss"][0])
    shutdown_tpu_system(resolver)


def test_connect_in_one_call(four_cores):
    assert isinstance(TPUClusterResolver.connect("local"), TPUClusterResolver)


def test_without_a_resolver(four_cores, monkeypatch):
    monkeypatch.setenv("TPU_NAME", "grpc://10.0.0.7:1")
    assert stratagem.TPUStrategy().cluster_resolver.master() == "grpc://10.0.0.7:1"


def test_the_experimental_one_is_one(four_cores):
    resolver = TPUClusterResolver("local")
    topology = initialize_tpu_system(resolver)
    two = DeviceAssignment.build(topology, num_replicas=2)
    strategy = stratagem.experimental.TPUStrategy(resolver, device_assignment=two)
    assert isinstance(strategy, stratagem.TPUStrategy)
    assert strategy.num_replicas_in_sync == 2


def test_options_of_run(strategy):
    xla = tf.tpu.XLAOptions(enable_xla_dynamic_padder=False)
    assert xla.use_spmd_for_xla_partitioning
    options = tf.distribute.RunOptions(False, experimental_xla_options=xla)
    assert strategy.run(lambda: np.float32(1), options=options) is not None


class TestDeviceAssignment:
    def test_chosen_cores_in_their_order(self, four_cores):
        topology = initialize_tpu_system()
        assignment = DeviceAssignment(topology, [[[3, 0, 0, 0]], [[1, 0, 0, 0]]])
        strategy = stratagem.TPUStrategy(experimental_device_assignment=assignment)
        assert strategy.worker_devices == ("/device:TPU:3", "/device:TPU:1")

    def test_several_cores_a_replica(self, four_cores):
        topology = initialize_tpu_system()
        pairs = DeviceAssignment.build(topology, [2, 1, 1, 1], num_replicas=2)
        with pytest.raises(NotImplementedError, match="expected one core a replica. Got 2. TPUStr"):
            stratagem.TPUStrategy(experimental_device_assignment=pairs)

    def test_cores_of_another_slice(self, four_cores):
        assignment = DeviceAssignment.build(initialize_tpu_system(), num_replicas=4)
        smaller = mock.patch.object(config, "_rehearsal", config._Rehearsal("tpu", 2))
        told = r"expected cores of this slice, .* Got \[\(2, 0, 0, 0\), \(3, 0, 0, 0\)\] as well"
        with smaller, pytest.raises(ValueError, match=told):
            stratagem.TPUStrategy(experimental_device_assignment=assignment)

    def test_no_assignment(self, four_cores):
        told = r"experimental_device_assignment: expected a DeviceAssignment. Got \[0\]"
        with pytest.raises(TypeError, match=told):
            stratagem.TPUStrategy(experimental_device_assignment=[0])


class TestLogicalDevices:
    """A replica is one core, so the calls check what they are told and change nothing."""

    def test_in_a_step(self, strategy):
        def step(x):
            x = strategy.experimental_assign_to_logical_device(x, 0)
            x = strategy.experimental_split_to_logical_devices(x, [1, 1])
            return strategy.experimental_replicate_to_logical_devices(x) * 2

        parts = [np.full((2, 3), i, np.float32) for i in range(4)]
        got = strategy.run(step, (stratagem.PerReplica(parts),)).values
        np.testing.assert_array_equal(got, [2 * part for part in parts])

    @pytest.mark.parametrize("device", [1, -1])
    def test_another_device(self, strategy, device):
        with pytest.raises(ValueError, match=f"expected 0, the one logical device .* Got {device}"):
            strategy.experimental_assign_to_logical_device(np.ones(2), device)

    def test_a_number_for_each_axis(self, strategy):
        with pytest.raises(ValueError, match=r"one number for each of the 2 axes .* Got \[1\]"):
            strategy.experimental_split_to_logical_devices(np.ones((2, 3)), [1])

    @pytest.mark.parametrize("parts", [[2, 1], [-1, -1], [0, 1]])
    def test_several_parts(self, strategy, parts):
        with pytest.raises(ValueError, match="a product of 1.* keras.distribution.ModelParallel"):
            strategy.experimental_split_to_logical_devices(np.ones((2, 3)), parts)


class TestNoTpu:
    TOLD = (
        r"Expected TPUs in this process. Got CPU:0, .*devices of JAX's platform 'tpu', for which "
        r"the package libtpu must be installed .*STRATAGEM_REHEARSE=tpu:8 in its environment"
    )

    def test_what_was_looked_for(self):
        resolver = TPUClusterResolver("grpc://10.0.0.2:8470")
        config.experimental_connect_to_cluster(resolver)  # one machine: nothing to join
        for call in (initialize_tpu_system, shutdown_tpu_system, stratagem.TPUStrategy):
            with pytest.raises(RuntimeError, match=self.TOLD) as caught:
                call(resolver)
            assert "The cluster resolver found: tpu='grpc://10.0.0.2:8470'." in str(caught.value)

    def test_without_a_resolver(self):
        with pytest.raises(RuntimeError, match=self.TOLD):
            initialize_tpu_system()

    def test_another_resolver(self):
        other = stratagem.cluster_resolver.TFConfigClusterResolver()
        with pytest.raises(TypeError, match="tpu_cluster_resolver: expected a TPUClusterResolver"):
            stratagem.TPUStrategy(other)


def test_describing_needs_libtpu(monkeypatch):
    from stratagem.strategies import described

    def missing(**_):
        raise RuntimeError("JAX TPU support not installed; cannot generate TPU topology.")

    monkeypatch.setattr(described.topologies, "get_topology_desc", missing)
    with pytest.raises(ImportError, match=r"expected the package libtpu, .* pip install 'jax\[tpu"):
        stratagem.experimental.DescribedTPUStrategy("v5e:2x2")
