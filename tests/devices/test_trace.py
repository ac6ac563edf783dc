"""How a step is traced: when, how often, with which arguments, and what it leaves alone."""

from __future__ import annotations

import logging
import re

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem
from stratagem.errors import ReplicaBranchError


@pytest.fixture
def strategy():
    return stratagem.MirroredStrategy(["cpu:0", "cpu:1"])


def floats(value):
    return [float(v) for v in value.values]


def counted(fn):
    """`fn` with `calls`, the number of times that Python ran it."""

    def wrapped(*args, **kwargs):
        wrapped.calls += 1
        return fn(*args, **kwargs)

    wrapped.calls = 0
    return wrapped


def two(*shape, dtype="float32"):
    return stratagem.PerReplica([np.ones(shape, dtype), np.full(shape, 2, dtype)])


# How often.


def test_a_step_without_variables_is_traced_once(strategy):
    fn = counted(lambda x: x * 2)
    for _ in range(3):
        assert floats(strategy.run(fn, (two(),))) == [2, 4]
    assert fn.calls == 1


def test_variables_cost_one_more_trace_the_first_time(strategy):
    with strategy.scope():
        v = keras.Variable(2.0)
    fn = counted(lambda x: jnp.sum(x) * v)
    strategy.run(fn, (two(3),))
    assert fn.calls == 2  # to find the variable, then to use it
    strategy.run(fn, (two(3),))
    assert fn.calls == 2
    strategy.run(fn, (two(4),))
    assert fn.calls == 3  # a further shape: the variable is known
    strategy.run(fn, (two(3),))
    assert fn.calls == 3


def test_dtypes_and_structures_are_signatures_too(strategy):
    fn = counted(lambda x: x)
    strategy.run(fn, (two(),))
    strategy.run(fn, (two(dtype="int32"),))
    strategy.run(fn, ({"x": two()},))
    strategy.run(fn, kwargs={"x": two()})
    assert fn.calls == 4


def test_uneven_rows_are_one_trace_a_row_count(strategy):
    fn = counted(lambda x: x.sum())
    parts = stratagem.PerReplica([np.ones(3, "float32"), np.ones(2, "float32")])
    assert floats(strategy.run(fn, (parts,))) == [3, 2]
    assert fn.calls == 2
    same = stratagem.PerReplica([np.ones(3, "float32"), np.zeros(2, "float32")])
    assert floats(strategy.run(fn, (same,))) == [3, 0]
    assert fn.calls == 2


def test_methods_are_one_function(strategy):
    class Loop:
        calls = 0

        def step(self, x):
            self.calls += 1
            return x

    loop, other = Loop(), Loop()
    for _ in range(3):
        strategy.run(loop.step, (two(),))
    strategy.run(other.step, (two(),))
    assert (loop.calls, other.calls) == (1, 1)


def test_warning_about_many_traces(strategy, caplog):
    with caplog.at_level(logging.WARNING, logger="stratagem"):
        for i in range(18):
            strategy.run(lambda: jnp.float32(i))  # noqa: B023  # a new function each time
    (record,) = caplog.records
    assert re.search(r"<lambda>.* has been traced 16 times", record.getMessage())
    assert "Define the step once, outside the loop" in record.getMessage()


def test_a_function_that_touches_new_variables_each_time(strategy):
    def fn():
        return keras.Variable(1.0) * 2

    with pytest.raises(RuntimeError, match="touches the same variables each time.*in each of 8"):
        strategy.run(fn)


def test_a_failing_function_fails_with_its_own_error(strategy):
    with strategy.scope():
        v = keras.Variable(1.0)

    def fn():
        if v.value.shape == ():
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        strategy.run(fn)
    with pytest.raises(KeyError, match="mine"):
        strategy.run(fn)
    assert stratagem.get_strategy() is not strategy
    assert float(v.value) == 1.0


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_a_failing_step_of_a_model_leaves_the_model_whole(strategy, method):
    class Fails(keras.layers.Layer):
        def call(self, x):
            if x.shape[0] == 3 and getattr(self, "armed", False):
                raise KeyError("mine")
            return x

    with strategy.scope():
        fails = Fails()
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1), fails])
        model.compile("sgd", "mse")
    x, y = np.ones((6, 2), "float32"), np.ones((6, 1), "float32")
    before = model.get_weights()
    args = (x,) if method == "predict" else (x, y)
    fails.armed = True
    with pytest.raises(KeyError, match="mine"):
        getattr(model, method)(*args, batch_size=6, verbose=0)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    fails.armed = False
    getattr(model, method)(*args, batch_size=6, verbose=0)


# Variables made on the way.


def test_variables_created_once(strategy):
    class Counter:
        made = None

        def __call__(self, x):
            if self.made is None:
                self.made = keras.Variable(0.0, aggregation="sum", name="lazy")
            self.made.assign_add(x)
            return self.made.value

    counter = Counter()
    for expected in (3, 6, 9):
        assert floats(strategy.run(counter, (two(),))) == [expected] * 2
    assert strategy.extended.variable_created_in_scope(counter.made)
    assert float(counter.made.value) == 9


def test_initial_values_that_the_step_computes(strategy):
    with pytest.raises(ValueError, match="initial value that is known while.*Pass a number"):
        strategy.run(lambda: keras.Variable(jnp.zeros(())))


def test_models_built_in_the_first_step(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam()

    def step(x):
        with stratagem.GradientTape() as tape:
            loss = stratagem.nn.compute_average_loss(jnp.square(model(x))[:, 0])
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    losses = []
    for _ in range(3):
        losses.append(float(strategy.reduce("SUM", strategy.run(step, (two(2, 4),)), axis=None)))
    assert losses[2] < losses[1] < losses[0]
    assert int(optimizer.iterations.value) == 3
    assert all(strategy.extended.variable_created_in_scope(v) for v in model.variables)
    assert [v.shape for v in model.trainable_variables] == [(4, 3), (3,), (3, 1), (1,)]


def test_the_initial_value_is_drawn_once(strategy):
    with strategy.scope():
        layer = keras.layers.Dense(2)
    first = strategy.run(layer, (two(1, 3),))
    again = strategy.run(layer, (two(1, 3),))
    np.testing.assert_array_equal(first.values[0], again.values[0])
    np.testing.assert_allclose(
        first.values[0], np.ones((1, 3)) @ np.asarray(layer.kernel), rtol=1e-6
    )


# Arguments.


def test_python_numbers_are_constants(strategy):
    seen = []

    def fn(i, f, b, s, n, x):
        seen.append((i, f, b, s, n))
        return x * i + f if b else x

    assert floats(strategy.run(fn, (2, 0.5, True, "text", None, two()))) == [2.5, 4.5]
    assert floats(strategy.run(fn, (2, 0.5, False, "text", None, two()))) == [1, 2]
    strategy.run(fn, (2.0, 0.5, True, "text", None, two()))  # not the program of the int
    assert seen == [
        (2, 0.5, True, "text", None),
        (2, 0.5, False, "text", None),
        (2.0, 0.5, True, "text", None),
    ]
    assert [type(s[0]) for s in seen] == [int, int, float]


def test_one_and_true_make_different_programs(strategy):
    kinds = [strategy.run(lambda flag: type(flag).__name__, (x,)) for x in (1, True, 1.0)]
    assert kinds == ["int", "bool", "float"]


def test_arrays_are_not_constants(strategy):
    fn = counted(lambda a, b, c: a + b + c)
    for x in (1, 2):
        args = (np.float32(x), np.full((), x, "float32"), jnp.float32(x))
        assert floats(strategy.run(fn, args)) == [3 * x] * 2
    assert fn.calls == 1


def test_mirrored_values_and_variables(strategy):
    with strategy.scope():
        v = keras.Variable(5.0)
    mirrored = stratagem.Mirrored([np.float32(1), np.float32(1)])
    assert floats(strategy.run(lambda m, var: m + var, (mirrored, v))) == [6, 6]


def test_float64_and_int64_arrive_as_jax_keeps_them(strategy):
    fn = counted(lambda x: x)
    for dtype, kept in (("float64", "float32"), ("int64", "int32")):
        result = strategy.run(fn, (np.ones(2, dtype),))
        assert result.values[0].dtype == kept
        assert strategy.run(fn, (two(2, dtype=dtype),)).values[0].dtype == kept


def test_random_keys(strategy):
    """Shared, per replica, captured and as results; with even and uneven rows."""
    key, keys = jax.random.key(7), list(jax.random.split(jax.random.key(8)))

    def fn(x, shared, own):
        folded = jax.random.fold_in(key, x.shape[0])
        total = stratagem.get_replica_context().all_reduce("SUM", jnp.sum(x))
        noise = [jax.random.normal(k, x.shape) for k in (key, shared, own, folded)]
        return noise, total, folded

    for sizes in ((2, 2), (2, 1)):
        parts = stratagem.PerReplica([np.ones(n, "float32") for n in sizes])
        noise, total, carried = strategy.run(fn, (parts, key, stratagem.PerReplica(keys)))
        for r, size in enumerate(sizes):
            folded = jax.random.fold_in(key, size)
            for got, k in zip(noise, (key, key, keys[r], folded), strict=True):
                np.testing.assert_array_equal(got.values[r], jax.random.normal(k, (size,)))
            np.testing.assert_array_equal(
                jax.random.key_data(carried.values[r]), jax.random.key_data(folded)
            )
        assert floats(total) == [sum(sizes)] * 2


@pytest.mark.parametrize("outer", [jax.jit, jax.grad])
def test_inside_a_jax_transformation(strategy, outer):
    def fn(x):
        return strategy.run(lambda y: y * 2, (x,)).values[0]

    with pytest.raises(TypeError, match="inside a JAX transformation.*@stratagem.function"):
        outer(fn)(jnp.float32(1))


def test_collectives_under_vmap(strategy):
    def fn(x):
        context = stratagem.get_replica_context()
        total = jax.vmap(lambda a: context.all_reduce("SUM", a))(x)
        everyone = jax.vmap(lambda a: context.all_gather(a[None], 0), in_axes=0, out_axes=1)(x)
        own = jax.vmap(lambda a: a + context.replica_id_in_sync_group)(x)
        return total, everyone, own

    total, everyone, own = strategy.run(fn, (two(3),))
    assert np.asarray(total.values[0]).tolist() == [3, 3, 3]
    assert np.asarray(everyone.values[0]).tolist() == [[1, 1, 1], [2, 2, 2]]
    assert np.asarray(own.values[1]).tolist() == [3, 3, 3]


def test_keyword_arguments_and_nests(strategy):
    def fn(batch, *, scale):
        return {"sum": batch["x"] + batch["y"][0], "scaled": [batch["x"] * scale]}

    result = strategy.run(fn, ({"x": two(), "y": [two()]},), {"scale": np.float32(3)})
    assert floats(result["sum"]) == [2, 4]
    assert floats(result["scaled"][0]) == [3, 6]


def test_objects_that_cannot_be_hashed(strategy):
    class Config:
        __hash__ = None

        def __init__(self, scale):
            self.scale = scale

    fn = counted(lambda c, x: x * c.scale)
    one = Config(3)
    assert floats(strategy.run(fn, (one, two()))) == [3, 6]
    assert floats(strategy.run(fn, (one, two()))) == [3, 6]
    assert fn.calls == 1
    for scale in range(4, 8):  # objects that may be made where an earlier one was
        assert floats(strategy.run(fn, (Config(scale), two()))) == [scale, 2 * scale]


def test_results_that_are_no_tensors(strategy):
    text, nothing, number = strategy.run(lambda: ("text", None, 3))
    assert (text, nothing, number) == ("text", None, 3)


# What the user still holds.


def test_values_that_the_user_holds_survive(strategy):
    with strategy.scope():
        v = keras.Variable(np.arange(3.0), aggregation="sum")
    held = v.value
    view = np.asarray(v.value)
    shard = v.value.addressable_shards[1].data
    mirrored = strategy.experimental_local_results(strategy.run(lambda: v.value))
    for _ in range(2):
        strategy.run(lambda x: v.assign_add(x), (two(3),))
    for old in (held, view, shard, mirrored[0]):
        np.testing.assert_array_equal(np.asarray(old), [0, 1, 2])
    np.testing.assert_array_equal(np.asarray(v.value), [6, 7, 8])


def test_only_values_that_someone_holds_are_copied(strategy, monkeypatch):
    with strategy.scope():
        v, w = (
            keras.Variable(0.0),
            keras.Variable(0.0, aggregation="sum", synchronization="on_read"),
        )

    def fn():
        v.assign_add(1.0)
        w.assign_add(1.0)

    copied = []
    copy = jnp.copy
    monkeypatch.setattr(jnp, "copy", lambda x: copied.append(x) or copy(x))
    for _ in range(3):
        strategy.run(fn)
    assert copied == []
    held = v.value
    strategy.run(fn)
    assert len(copied) == 1
    assert float(held) == 3.0


def test_values_of_components_survive(strategy):
    with strategy.scope():
        v = keras.Variable(0.0, aggregation="sum", synchronization="on_read", trainable=False)
    strategy.run(lambda: v.assign_add(1.0))
    held, total = v.components, v.value
    strategy.run(lambda: v.assign_add(1.0))
    assert np.asarray(held).tolist() == [1, 1]
    assert float(total) == 2.0
    assert float(v.value) == 4.0


def test_arguments_survive(strategy):
    with strategy.scope():
        v = keras.Variable(1.0)
    batch = strategy.run(lambda x: x * 1, (two(2),))
    x = jnp.float32(3)
    for _ in range(2):
        strategy.run(lambda a, b: v.assign(b + 0 * b), (batch, x))
    assert floats(strategy.run(jnp.sum, (batch,))) == [2, 4]
    assert float(x) == 3


def test_assigned_arrays_survive(strategy):
    """The array that a variable was given is still the user's."""
    with strategy.scope():
        v, w = keras.Variable(0.0), keras.Variable(0.0)
    given = strategy.place(np.float32(5))
    v.assign(given)
    w.assign(given)
    strategy.run(lambda: (v.assign_add(1.0), w.assign_add(2.0)) and None)
    assert float(given) == 5.0
    assert [float(x.value) for x in (v, w)] == [6, 7]


def test_prints(strategy, capfd):
    strategy.run(lambda x: jax.debug.print("value {}", x), (two(),))
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.split("\n")) == ["", "value 1.0", "value 2.0"]


# Branches on what only the replica knows.


def branch(x):
    if stratagem.get_replica_context().replica_id_in_sync_group == 0:  # the line of the error
        return x
    return x * 2


@pytest.mark.parametrize(
    ("fn", "function"),
    [
        (branch, "branch"),
        (lambda x: int(x), "<lambda>"),
        (lambda x: float(x), "<lambda>"),
        (lambda x: np.asarray(x), "<lambda>"),
        (lambda x: [1, 2][x.astype(int)], "<lambda>"),
    ],
)
def test_branches_name_the_line_and_what_to_write_instead(strategy, fn, function):
    with pytest.raises(ReplicaBranchError) as caught:
        strategy.run(fn, (two(),))
    text = str(caught.value)
    line = fn.__code__.co_firstlineno + (function == "branch")
    assert f" at {__file__}:{line} in {function} " in text
    assert "jnp.where(replica_id == 0, a, b)" in text
    assert "jax.lax.cond(replica_id == 0, f, g)" in text
    assert "jax.debug.print" in text


def test_branches_on_variables(strategy):
    with strategy.scope():
        v = keras.Variable(1.0)

    def fn():
        while v > 0:
            v.assign_sub(1.0)

    with pytest.raises(ReplicaBranchError, match=rf"{re.escape(__file__)}:\d+ in fn "):
        strategy.run(fn)
    assert float(v.value) == 1.0


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: jax.vmap(jax.jit(f))])
@pytest.mark.parametrize("first", [False, True])
def test_helpers_that_jax_remembers_read_what_variables_hold(wrap, first):
    """JAX traces such a function once for all that call it: in a step, another one, and outside."""
    strategy = stratagem.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        v = keras.Variable(3.0)
    helper = wrap(lambda x: x * v.value)
    x = np.array([2.0], np.float32)

    def step(x):
        known = v + 0.0 if first else 0.0
        with stratagem.GradientTape() as tape:
            y = jnp.sum(helper(x))
        return y, tape.gradient(y, v), known

    def another(x):
        return jnp.sum(helper(x)) + 1.0

    assert [float(r.values[1]) for r in strategy.run(step, (x,))[:2]] == [6.0, 2.0]
    v.assign(5.0)
    assert float(strategy.run(step, (x,))[0].values[0]) == 10.0
    assert float(strategy.run(another, (x,)).values[0]) == 11.0
    assert float(wrap(lambda x: x * v.value)(x)[0]) == 10.0
    assert float(helper(x)[0]) == 10.0
