"""compute_average_loss and scale_regularization_loss, on replicas and outside."""

from __future__ import annotations

import numpy as np
import pytest

import stratagem
from stratagem import nn


@pytest.fixture(scope="module")
def two():
    return stratagem.MirroredStrategy(["cpu:0", "cpu:1"])


def each(strategy, fn, *args):
    return [float(v) for v in strategy.experimental_local_results(strategy.run(fn, args))]


LOSSES = np.array([1.0, 3.0], np.float32)


def test_default_size_is_the_rows_of_all_replicas(two):
    assert each(two, lambda: nn.compute_average_loss(LOSSES)) == [1.0, 1.0]


def test_given_global_batch_size(two):
    assert each(two, lambda: nn.compute_average_loss(LOSSES, global_batch_size=8)) == [0.5, 0.5]


def test_sample_weight(two):
    weights = np.array([1.0, 0.5], np.float32)
    assert each(two, lambda: nn.compute_average_loss(LOSSES, weights)) == [0.625, 0.625]


def test_sample_weight_of_rows_weighs_whole_rows(two):
    losses, weights = np.ones((2, 3), np.float32), np.array([1.0, 0.0], np.float32)
    assert each(two, lambda: nn.compute_average_loss(losses, weights)) == [0.75, 0.75]


def test_size_zero_gives_zero(two):
    assert each(two, lambda: nn.compute_average_loss(LOSSES, global_batch_size=0)) == [0.0, 0.0]


def test_uneven_rows_divide_by_the_rows_that_are_there(two):
    rows = stratagem.PerReplica([np.ones(3, np.float32), np.full(1, 5.0, np.float32)])
    parts = two.run(nn.compute_average_loss, (rows,))
    assert [float(v) for v in parts.values] == [0.75, 1.25]


def test_no_rows_at_all_give_zero(two):
    rows = stratagem.PerReplica([np.ones(0, np.float32), np.ones(0, np.float32)])
    assert [float(v) for v in two.run(nn.compute_average_loss, (rows,)).values] == [0.0, 0.0]


def test_default_context_divides_by_its_own_rows():
    assert float(nn.compute_average_loss(LOSSES)) == 2.0


def test_scale_regularization_loss_counts_once(two):
    penalties = np.array([4.0, 2.0], np.float32)
    assert each(two, lambda: nn.scale_regularization_loss(penalties)) == [3.0, 3.0]
    assert float(nn.scale_regularization_loss(penalties)) == 6.0


def test_scalar_loss_is_refused():
    with pytest.raises(ValueError, match="one loss a row. Got a scalar"):
        nn.compute_average_loss(1.0)


def test_sizes_are_checked():
    with pytest.raises(ValueError, match=r"Expected a scalar global_batch_size. Got shape \(1,\)"):
        nn.compute_average_loss(LOSSES, global_batch_size=[2])
    with pytest.raises(TypeError, match="Expected an integer global_batch_size. Got dtype float32"):
        nn.compute_average_loss(LOSSES, global_batch_size=2.0)


def test_cross_replica_context_is_refused_without_a_size(two):
    with two.scope():
        with pytest.raises(RuntimeError, match="compute_average_loss without global_batch_size"):
            nn.compute_average_loss(LOSSES)
        assert float(nn.compute_average_loss(LOSSES, global_batch_size=4)) == 1.0
        with pytest.raises(RuntimeError, match="scale_regularization_loss inside a replica"):
            nn.scale_regularization_loss(LOSSES)
