"""TF's enums of variable rules, passed to keras.Variable and Layer.add_weight."""

from __future__ import annotations

import keras
import pytest

import stratagem
from stratagem import VariableAggregation, VariableSynchronization


def test_values_are_those_of_tf():
    assert [(m.name, m.value) for m in VariableAggregation] == [
        ("NONE", 0),
        ("SUM", 1),
        ("MEAN", 2),
        ("ONLY_FIRST_REPLICA", 3),
    ]
    assert [(m.name, m.value) for m in VariableSynchronization] == [
        ("AUTO", 0),
        ("NONE", 1),
        ("ON_WRITE", 2),
        ("ON_READ", 3),
    ]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        (VariableAggregation.SUM, 2.0),
        (VariableAggregation.MEAN, 1.0),
        (VariableAggregation.ONLY_FIRST_REPLICA, 1.0),
    ],
)
def test_a_counter_counts_as_its_aggregation_says(aggregation, expected):
    """R25: assign_add(1) on two replicas."""
    strategy = stratagem.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        counter = keras.Variable(
            0.0,
            trainable=False,
            aggregation=aggregation,
            synchronization=VariableSynchronization.ON_WRITE,
        )
    strategy.run(lambda: counter.assign_add(1.0))
    assert float(counter.value) == expected


def test_add_weight_takes_them_too():
    class Counter(keras.Layer):
        def build(self, _):
            self.seen = self.add_weight(
                shape=(), trainable=False, aggregation=VariableAggregation.SUM
            )

    layer = Counter()
    layer.build(None)
    assert layer.seen.aggregation == "sum"
