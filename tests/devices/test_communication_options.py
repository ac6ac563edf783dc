"""CommunicationOptions: checked, merged, and seen in the compiled program."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import pytest

import stratagem
from stratagem.collectives import CommunicationImplementation, CommunicationOptions
from stratagem.collectives.options import collective_hints
from stratagem.strategies.abstract import Strategy

RING, NCCL = CommunicationImplementation.RING, CommunicationImplementation.NCCL


def program(options):
    """The compiled text of a step that sums three values of 400 bytes, and its results."""
    ops = options.cross_device_ops()
    strategy = stratagem.MirroredStrategy(["cpu:0", "cpu:1"], ops)
    rng = np.random.default_rng(0)
    values = [rng.normal(size=100).astype("float32") for _ in range(3)]

    def step(*values):
        context = stratagem.get_replica_context()
        factor = context.replica_id_in_sync_group + 1
        return context.all_reduce("SUM", [factor * value for value in values])

    sums = strategy.run(step, args=values)
    for total, value in zip(sums, values, strict=True):
        for part in total.values:
            np.testing.assert_allclose(part, 3 * value, rtol=1e-6)
    return strategy.lower(step, args=values).compile().as_text()


@pytest.mark.parametrize(
    ("bytes_per_pack", "packs"), [(0, 1), (1, 3), (400, 3), (401, 2), (800, 2), (10**6, 1)]
)
def test_packs_are_all_reduces_of_their_own(bytes_per_pack, packs):
    text = program(CommunicationOptions(bytes_per_pack=bytes_per_pack))
    assert len(re.findall(r" all-reduce(-start)?\(", text)) == packs


@pytest.mark.parametrize(("bytes_per_pack", "packs"), [(0, 1), (400, 3)])
def test_ring_sends_messages_instead(bytes_per_pack, packs):
    text = program(CommunicationOptions(bytes_per_pack, implementation=RING))
    assert " all-reduce(" not in text
    # Two neighbours: one message to scatter, one to gather, a pack.
    assert len(re.findall(r" collective-permute(-start)?\(", text)) == 2 * packs


def test_the_packs_cost_what_their_ops_cost():
    values = [np.zeros(100, "float32")] * 3
    whole = CommunicationOptions(implementation=RING).cross_device_ops()
    packed = CommunicationOptions(400, implementation=RING).cross_device_ops()
    assert packed.cost(values, 4).max_messages == 3 * whole.cost(values, 4).max_messages
    assert packed.cost(values, 4).bytes_sent == whole.cost(values, 4).bytes_sent


def test_gathers_pass_through():
    strategy = stratagem.MirroredStrategy(
        ["cpu:0", "cpu:1"], CommunicationOptions(bytes_per_pack=8).cross_device_ops()
    )
    total = strategy.run(
        lambda x: stratagem.get_replica_context().all_gather(x, 0), args=(jnp.ones(2),)
    )
    assert total.values[0].tolist() == [1, 1, 1, 1]


def test_merge_takes_what_is_not_the_default():
    first = CommunicationOptions(bytes_per_pack=5, timeout_seconds=1.0, implementation=RING)
    merged = first.merge(CommunicationOptions(timeout_seconds=2.0, implementation=NCCL))
    assert merged == CommunicationOptions(5, 2.0, NCCL)


def test_every_wait_has_a_deadline():
    default, short = CommunicationOptions(), CommunicationOptions(timeout_seconds=7)
    assert (default.start_seconds, default.step_seconds) == (300, 1800)
    assert (short.start_seconds, short.step_seconds) == (7, 7)


def test_hints_are_options_without_an_implementation():
    assert collective_hints(7, 1.5) == CommunicationOptions(7, 1.5)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"bytes_per_pack": -1}, "bytes_per_pack=-1 is no number of bytes"),
        ({"bytes_per_pack": 1.5}, "bytes_per_pack=1.5 is no number of bytes"),
        ({"timeout_seconds": 0}, "timeout_seconds=0 is not positive"),
        ({"implementation": "RING"}, "implementation='RING' is none"),
    ],
)
def test_bad_options_are_refused(arguments, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        CommunicationOptions(**arguments)


def test_all_bad_options_are_named():
    with pytest.raises(ValueError, match="bytes_per_pack=-1 .*; timeout_seconds=-2 .*; implem"):
        CommunicationOptions(-1, -2, None)


@pytest.mark.parametrize("given", [RING, "RING", 3])
def test_a_bare_implementation_is_no_options(given):
    with pytest.raises(ValueError, match="Expected communication_options to be Communication"):
        stratagem.MultiWorkerMirroredStrategy(communication_options=given)


def test_without_a_cluster_it_trains_on_this_process():
    strategy = stratagem.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == 8
    assert strategy.job is None
    assert isinstance(strategy, Strategy)
    assert strategy.cluster_resolver.cluster_spec().jobs == []
    assert float(strategy.reduce("MEAN", np.float32(3), None)) == 3


def test_a_resolver_is_checked():
    with pytest.raises(TypeError, match="Expected cluster_resolver to be a ClusterResolver. Got"):
        stratagem.MultiWorkerMirroredStrategy("worker:1")


def test_a_strategy_after_jax_has_started_is_refused(monkeypatch):
    monkeypatch.setenv(
        "TF_CONFIG",
        '{"cluster": {"worker": ["localhost:1", "localhost:2"]},'
        ' "task": {"type": "worker", "index": 0}}',
    )
    with pytest.raises(RuntimeError, match="to be created before anything uses JAX: its backend"):
        stratagem.MultiWorkerMirroredStrategy()
