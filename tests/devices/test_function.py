"""stratagem.function: run and reduce in one program, and which strategy it belongs to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem


@pytest.fixture
def two():
    return stratagem.MirroredStrategy(["cpu:0", "cpu:1"])


def replica_id():
    return stratagem.get_replica_context().replica_id_in_sync_group


def test_run_and_reduce_are_one_program(two):
    traced = []

    @stratagem.function
    def step(x):
        traced.append(1)
        parts = two.run(lambda v: v + replica_id(), (x,))
        return two.reduce("SUM", parts, axis=None)

    for _ in range(3):
        assert float(step(stratagem.PerReplica([np.float32(1), np.float32(2)]))) == 4.0
    # Once to find its strategy, once for the program: not again for the same shapes.
    assert len(traced) <= 2


def test_per_replica_results_stay_distributed(two):
    @stratagem.function
    def step(x):
        return two.run(lambda v: v * 2, (x,)), "text"

    result, text = step(stratagem.PerReplica([np.float32(1), np.float32(2)]))
    assert [float(v) for v in result.values] == [2.0, 4.0]
    assert text == "text"


def test_reduce_with_an_axis_counts_elements(two):
    uneven = stratagem.PerReplica([np.array([1, 2], np.float32), np.array([6], np.float32)])
    mean = stratagem.function(lambda x: two.reduce("MEAN", x, axis=0), strategy=two)
    assert float(mean(uneven)) == 3.0
    gathered = stratagem.function(lambda x: two.gather(x, axis=0), strategy=two)(uneven)
    np.testing.assert_array_equal(gathered, [1, 2, 6])


def test_without_a_strategy_it_compiles_for_one_replica():
    v = keras.Variable(2.0)

    @stratagem.function
    def square(x):
        with stratagem.GradientTape() as tape:
            y = v * v * x
        return tape.gradient(y, v)

    assert float(square(jnp.float32(3))) == 12.0


def test_current_strategy_is_taken(two):
    with two.scope():
        v = keras.Variable(1.0, aggregation="sum")

        @stratagem.function
        def step():
            two.run(lambda: v.assign_add(1.0))
            return v.value + 0

        assert float(step()) == 3.0
        assert float(v.value) == 3.0


def test_methods_and_nested_functions(two):
    class Loop:
        def __init__(self):
            self.scale = 3.0

        @stratagem.function
        def step(self, x):
            return two.reduce("SUM", two.run(self.inner, (x,)), axis=None)

        @stratagem.function
        def inner(self, x):
            return x * self.scale

    loop = Loop()
    assert float(loop.step(stratagem.PerReplica([np.float32(1), np.float32(2)]))) == 9.0


def test_on_read_variables_read_as_their_aggregate(two):
    with two.scope():
        v = keras.Variable(0.0, aggregation="sum", synchronization="on_read", trainable=False)

    @stratagem.function
    def step():
        two.run(lambda: v.assign_add(1.0))
        return v.value

    assert float(step()) == 2.0


def summed_in_cross_replica_context():
    context = stratagem.get_replica_context()
    return context.merge_call(lambda strategy, v: strategy.reduce("SUM", v, None), (jnp.ones(2),))


@pytest.mark.parametrize("devices", [None, ["cpu:0"]])
def test_one_replica_gives_plain_tensors_inside_a_program_too(devices):
    one = stratagem.get_strategy() if devices is None else stratagem.MirroredStrategy(devices)

    def use():
        result = one.run(lambda: {"x": jnp.arange(2), "why": "none"})
        again = one.run(lambda x: x + 1, (result["x"],))
        (local,) = one.experimental_local_results(result)
        assert local["why"] == "none"
        assert result["x"].shape == (2,)
        mean = one.reduce("MEAN", result["x"], axis=0)
        merged = one.run(summed_in_cross_replica_context)
        return (
            local["x"] + 1,
            again,
            one.reduce("SUM", again, None),
            one.gather(again, 0),
            mean,
            merged,
        )

    found, expected = stratagem.function(use)(), use()
    for a, b in zip(found, expected, strict=True):
        assert (a.dtype, a.tolist()) == (b.dtype, b.tolist())
    assert found[0].tolist() == [1, 2]


def test_captured_per_replica_values_are_refused(two):
    captured = stratagem.PerReplica([np.float32(1), np.float32(2)])
    step = stratagem.function(lambda: two.run(lambda x: x, (captured,)))
    with pytest.raises(ValueError, match="captured from outside. Pass it as an argument"):
        step()


def test_parts_of_a_traced_value_are_refused(two):
    step = stratagem.function(lambda x: two.run(lambda v: v, (x,)).values, strategy=two)
    with pytest.raises(ValueError, match="The parts exist only after the compiled call returned"):
        step(stratagem.PerReplica([np.float32(1), np.float32(2)]))


def test_another_strategy_inside_run_of_the_default_one_is_refused(two):
    default = stratagem.get_strategy()
    with pytest.raises(RuntimeError, match="Got a call under the default strategy"):
        default.run(lambda: two.run(lambda: jax.numpy.zeros(())))
