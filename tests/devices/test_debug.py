"""stratagem.debug: a spoiled or diverged replica is named, with the variable and the stage."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem
from stratagem import debug
from stratagem.errors import DivergedError


@pytest.fixture(scope="module")
def strategy():
    # Not in the order of the devices: replica 0 is on cpu:2.
    return stratagem.MirroredStrategy(["cpu:2", "cpu:0", "cpu:1"])


def make(strategy, value, name="v", **options):
    with strategy.scope():
        return keras.Variable(value, name=name, **options)


def corrupt(variable, replica, index, value):
    """Changes one element of one replica's copy."""
    copies = [np.array(s.data) for s in variable.value.addressable_shards]
    shards = sorted(variable.value.addressable_shards, key=lambda s: s.replica_id)
    copies = [np.array(s.data) for s in shards]
    copies[replica][index] = value
    variable._value = jax.make_array_from_single_device_arrays(
        variable.value.shape,
        variable.value.sharding,
        [jax.device_put(c, s.device) for c, s in zip(copies, shards, strict=True)],
    )


def small_model(strategy):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="head")])
        model.compile("adam", "mse", metrics=["mae"])
    return model


def data(rows=6):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 2)).astype("float32"), np.zeros((rows, 1), "float32")


# check


def test_equal_copies_pass(strategy):
    model = small_model(strategy)
    model.fit(*data(), batch_size=3, verbose=0)
    component = make(strategy, 1.0, aggregation="sum", synchronization="on_read")
    strategy.run(lambda: component.assign_add(jnp.float32(1)))
    debug.check(model, model.layers[0], model.optimizer, component, strategy)
    debug.check(keras.Variable(1.0), make(strategy, [1, 2], dtype="int32"))


def test_a_diverged_copy(strategy):
    v = make(strategy, np.zeros((2, 3)), "kernel")
    corrupt(v, 1, (1, 2), 7)
    with pytest.raises(
        DivergedError,
        match=r"variable 'kernel': replica 1 holds 7.0, replica 0 holds 0.0 at index \(1, 2\) "
        r"\(1 of 6 elements are wrong\)",
    ):
        debug.check(v)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "bool", "uint8"])
def test_every_dtype(strategy, dtype):
    v = make(strategy, np.zeros(2), dtype=dtype, trainable=False)
    debug.check(v)
    corrupt(v, 2, (1,), 1)
    with pytest.raises(DivergedError, match=r"replica 2 holds .* at index \(1,\)"):
        debug.check(v)


def test_zeros_of_different_signs_differ(strategy):
    v = make(strategy, 0.0)
    corrupt(v, 2, (), -0.0)
    with pytest.raises(DivergedError, match=r"replica 2 holds -0.0, replica 0 holds 0.0"):
        debug.check(v)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(strategy, value):
    v = make(strategy, np.zeros(4), "bias")
    corrupt(v, 2, (3,), value)
    with pytest.raises(DivergedError, match=rf"'bias': replica 2 holds {value} at index \(3,\)"):
        debug.check(v)


def test_components_need_only_be_finite(strategy):
    v = make(strategy, 0.0, "total", aggregation="sum", synchronization="on_read")
    strategy.run(
        lambda: v.assign(jnp.log(stratagem.get_replica_context().replica_id_in_sync_group - 1.0))
    )
    with pytest.raises(DivergedError) as caught:
        debug.check(v)
    text = str(caught.value)
    assert "'total': replica 0 holds nan" in text
    assert "'total': replica 1 holds -inf" in text
    assert "replica 2" not in text


def test_all_offenders_in_order(strategy):
    many = [make(strategy, 0.0, f"v{i}") for i in range(25)]
    for v in many:
        corrupt(v, 1, (), 1)
    with pytest.raises(DivergedError) as caught:
        debug.check(many[0], *many[1:])
    lines = str(caught.value).split("\n")
    assert lines[1].startswith("  variable 'v0'")
    assert lines[20].startswith("  variable 'v19'")
    assert lines[21] == "  and 5 more"
    assert lines[22] == "Find the step that made them with stratagem.debug.check_numerics()."


def test_a_model_is_checked_with_its_optimizer_and_metrics(strategy):
    model = small_model(strategy)
    model.fit(*data(), batch_size=3, verbose=0)
    corrupt(model.optimizer.variables[-1], 1, (0,), 5)
    with pytest.raises(DivergedError, match=r"'adam.*head_bias_velocity': replica 1"):
        debug.check(model)


def test_a_strategy_is_checked_by_what_its_steps_touched():
    strategy = stratagem.MirroredStrategy(["cpu:0", "cpu:1"])
    v = make(strategy, 0.0, "touched")
    strategy.run(lambda: v.value + 1)
    debug.check(strategy)
    corrupt(v, 1, (), 1)
    with pytest.raises(DivergedError, match="'touched': replica 1"):
        debug.check(strategy)


def test_targets_without_variables(strategy):
    with pytest.raises(TypeError, match="Expected models, layers, .* to check. Got 3"):
        debug.check(3)


# CheckReplicas


class Corrupt(keras.callbacks.Callback):
    def __init__(self, at):
        super().__init__()
        self.at = at

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.at:
            corrupt(self.model.layers[0].bias, 1, (0,), 9)
            self.model._jax_state_synced = True


def test_callback(strategy):
    model = small_model(strategy)
    model.fit(*data(), batch_size=3, verbose=0, callbacks=[debug.CheckReplicas()])
    with pytest.raises(DivergedError, match="head/bias': replica 1"):
        model.fit(
            *data(),
            batch_size=3,
            verbose=0,
            callbacks=[Corrupt(0), debug.CheckReplicas(every=1)],
        )


def test_callback_checks_at_the_end_of_an_epoch(strategy):
    model = small_model(strategy)
    with pytest.raises(DivergedError, match="head/bias': replica 1"):
        model.fit(
            *data(),
            batch_size=3,
            verbose=0,
            callbacks=[Corrupt(1), debug.CheckReplicas(every=100)],
        )


@pytest.mark.parametrize("every", [0, 1.5, True])
def test_callback_wants_a_number_of_batches(every):
    with pytest.raises(ValueError, match=f"every as a number of batches, at least 1. Got {every}"):
        debug.CheckReplicas(every)


# check_numerics


def rows(*values):
    return stratagem.PerReplica([np.array([v], "float32") for v in values])


def training_step(v, optimizer):
    def step(x):
        with stratagem.GradientTape() as tape:
            loss = jnp.sum(jnp.sqrt(v * x))  # infinite slope at 0, NaN below
        optimizer.apply_gradients([(tape.gradient(loss, v), v)])
        return loss

    return step


def test_gradient_of_one_replica(strategy):
    v = make(strategy, 1.0, "scale")
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([v])
    step = training_step(v, optimizer)
    with debug.check_numerics():
        strategy.run(step, (rows(1, 4, 9),))
    before = float(v.value)
    assert before < 1.0
    with debug.check_numerics(), pytest.raises(DivergedError) as caught:
        strategy.run(step, (rows(1, 0, 9),))
    text = str(caught.value)
    assert "NaN or infinity first before the gradients are combined" in text
    assert "replica 1: gradient of variable 'scale'" in text
    assert "replica 0" not in text
    assert "replica 2" not in text
    assert float(v.value) == before  # nothing was stored, nothing destroyed
    strategy.run(step, (rows(1, 0, 9),))  # without the checks it goes through, as before
    assert not np.isfinite(float(v.value))


def test_what_a_step_starts_from(strategy):
    v = make(strategy, 1.0, "start")
    corrupt(v, 2, (), np.nan)
    with debug.check_numerics(), pytest.raises(DivergedError) as caught:
        strategy.run(lambda x: x + v, (rows(np.inf, 1, 1),))
    assert "first before the step" in str(caught.value)
    assert "replica 0: array argument 0" in str(caught.value)
    assert "replica 2: variable 'start'" in str(caught.value)


def test_values_that_are_combined(strategy):
    def fn(x):
        return stratagem.get_replica_context().all_reduce("SUM", jnp.log(x))

    with (
        debug.check_numerics(),
        pytest.raises(
            DivergedError,
            match=r"before the values are combined:\n  replica 0: value of shape \(1,\)",
        ),
    ):
        strategy.run(fn, (rows(-1, 1, 1),))


def test_results_and_writes(strategy):
    v = make(strategy, 1.0, "component", aggregation="sum", synchronization="on_read")

    def write(x):
        v.assign(jnp.log(x)[0])

    with debug.check_numerics():
        with pytest.raises(
            DivergedError, match=r"in the step's results:\n  replica 1: array result 1\n"
        ):
            strategy.run(lambda x: (x, jnp.log(x), "text"), (rows(1, 0, 1),))
        with pytest.raises(
            DivergedError, match=r"in what the step writes:\n  replica 1: variable 'component'\n"
        ):
            strategy.run(write, (rows(1, 0, 1),))
        good = strategy.run(lambda x: (jnp.log(x), "text", 3), (rows(1, 1, 1),))
    assert good[1:] == ("text", 3)
    assert [float(p[0]) for p in good[0].values] == [0, 0, 0]


def test_uneven_rows(strategy):
    parts = stratagem.PerReplica(
        [np.ones(2, "float32"), np.zeros(1, "float32"), np.ones(0, "float32")]
    )
    with (
        debug.check_numerics(),
        pytest.raises(
            DivergedError, match=r"in the step's results:\n  replica 1: array result 0\n"
        ),
    ):
        strategy.run(jnp.log, (parts,))


def test_fit_names_the_replica(strategy):
    model = small_model(strategy)
    x, y = data()
    model.fit(x, y, batch_size=6, shuffle=False, verbose=0)
    before = model.get_weights()
    y[5] = 1e30  # its square is not finite; rows 4 and 5 are replica 2's
    with debug.check_numerics(), pytest.raises(DivergedError) as caught:
        model.fit(x, y, batch_size=6, shuffle=False, verbose=0)
    assert "replica 2: " in str(caught.value)
    assert "replica 1: " not in str(caught.value)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_gradients_of_fit(strategy):
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones", name="d")]
        )
        # The loss is finite at 0, its slope is not.
        model.compile("sgd", lambda y, p: keras.ops.sqrt(p))
    x = np.array([[1], [1], [0]], "float32")
    with debug.check_numerics(), pytest.raises(DivergedError) as caught:
        model.fit(x, x, batch_size=3, shuffle=False, verbose=0)
    assert "before the gradients are combined" in str(caught.value)
    named = re.findall(r"replica (\d): gradient of variable '.*/d/(\w+)'", str(caught.value))
    assert named == [("2", "kernel"), ("2", "bias")]


def test_one_replica_and_functions():
    one = stratagem.OneDeviceStrategy("cpu:3")
    v = make(one, 1.0, "scale")
    with one.scope():
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([v])
    step = stratagem.function(training_step(v, optimizer), strategy=one)
    with debug.check_numerics():
        with pytest.raises(DivergedError, match="replica 0: gradient of variable 'scale'"):
            one.run(training_step(v, optimizer), (np.zeros(1, "float32"),))
        with pytest.raises(DivergedError, match="replica 0: gradient of variable 'scale'"):
            step(np.zeros(1, "float32"))
    assert float(v.value) == 1.0
