"""GradientTape and value_and_grad: values, structures, and every error text."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem
from stratagem import GradientTape


@pytest.fixture(scope="module")
def strategy():
    return stratagem.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.fixture
def v(strategy):
    with strategy.scope():
        return keras.Variable(3.0, name="v")


@pytest.fixture
def w(strategy):
    with strategy.scope():
        return keras.Variable(2.0, name="w")


def run(strategy, fn, *args):
    """What replica 0 returns."""
    return jax.tree.map(
        lambda x: np.asarray(x.values[0]) if isinstance(x, stratagem.PerReplica) else x,
        strategy.run(fn, args),
        is_leaf=lambda x: isinstance(x, stratagem.PerReplica),
    )


def test_gradient_of_variables(strategy, v, w):
    def fn():
        with GradientTape() as tape:
            y = v * v * w
        return tape.gradient(y, [v, w])

    assert run(strategy, fn) == [12.0, 9.0]


def test_structure_of_sources(strategy, v, w):
    def fn(x):
        with GradientTape() as tape:
            y = v * v * w * x
        return tape.gradient(y, {"a": v, "b": [w, (x,)]})

    assert run(strategy, fn, np.float32(1)) == {"a": 12.0, "b": [9.0, (18.0,)]}


def test_several_targets_add_up(strategy, v):
    def fn():
        with GradientTape() as tape:
            targets = {"square": v * v, "double": [2 * v]}
        return tape.gradient(targets, v)

    assert run(strategy, fn) == 8.0


def test_target_with_elements_sums_them(strategy, v):
    def fn():
        with GradientTape() as tape:
            y = v * jnp.arange(4.0)
        return tape.gradient(y, v)

    assert run(strategy, fn) == 6.0


def test_output_gradients(strategy, v, w):
    def fn():
        with GradientTape() as tape:
            a, b = v * jnp.arange(3.0), w * v
        return tape.gradient([a, b], [v, w], output_gradients=[jnp.array([1.0, 10.0, 100.0]), 2.0])

    assert run(strategy, fn) == [214.0, 6.0]


def test_unconnected_sources(strategy, v, w):
    def fn():
        with GradientTape(persistent=True) as tape:
            y = v * v
        none = tape.gradient(y, [v, w])
        zero = tape.gradient(y, [v, w], unconnected_gradients="zero")
        return none, zero

    none, zero = run(strategy, fn)
    assert none == [6.0, None]
    assert zero == [6.0, 0.0]


def test_target_that_depends_on_nothing(strategy, v):
    def fn():
        with GradientTape(persistent=True) as tape:
            y = jnp.float32(2)
        return tape.gradient(y, v), tape.gradient(y, v, unconnected_gradients="zero")

    assert run(strategy, fn) == (None, 0.0)


def test_constant_source(strategy, v):
    def fn():
        with GradientTape() as tape:
            y = v * 2
        return tape.gradient(y, [v, 5.0])

    assert run(strategy, fn) == [2.0, None]


def test_integer_sources_are_unconnected(strategy, v):
    def fn(i):
        with GradientTape() as tape:
            y = v * i
        return tape.gradient(y, [v, i])

    assert run(strategy, fn, np.int32(4)) == [4.0, None]


def test_a_source_that_is_the_target(strategy, v):
    def fn(x):
        with GradientTape() as tape:
            y = x * 2
        return tape.gradient(y, y)

    assert run(strategy, fn, np.float32(4)) == 1.0


def test_persistent(strategy, v):
    def fn():
        with GradientTape(persistent=True) as tape:
            square = v * v
            cube = square * v
        return tape.gradient(square, v), tape.gradient(cube, v)

    assert run(strategy, fn) == (6.0, 27.0)


def test_persistent_with_targets_that_overlap(strategy, v, w):
    def fn(x):
        with GradientTape(persistent=True) as tape:
            hidden = jnp.tanh(v * x)
            out = hidden * w
        g_out, g_hidden = tape.gradient(out, [v, hidden, w]), tape.gradient(hidden, [v, x])
        return g_out, g_hidden

    x, vv, ww = 0.5, 3.0, 2.0
    h = np.tanh(vv * x)
    slope = 1 - h * h
    (gv, gh, gw), (hv, hx) = run(strategy, fn, np.float32(x))
    np.testing.assert_allclose([gv, gh, gw], [ww * slope * x, ww, h], rtol=1e-5)
    np.testing.assert_allclose([hv, hx], [slope * x, slope * vv], rtol=1e-5)


def test_watch_without_watching_accessed(strategy, v, w):
    def fn():
        with GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(v)
            y = v * w
        return tape.gradient(y, [v, w])

    assert run(strategy, fn) == [2.0, None]


def test_variables_that_are_not_trainable(strategy):
    with strategy.scope():
        frozen = keras.Variable(5.0, trainable=False)

    def fn(watch):
        with GradientTape() as tape:
            if watch:
                tape.watch([frozen])
            y = frozen * frozen
        return tape.gradient(y, frozen)

    assert run(strategy, fn, False) is None
    assert run(strategy, fn, True) == 10.0


def test_watched_tensors(strategy):
    def fn(x):
        with GradientTape() as tape:
            tape.watch(x)
            y = x * x
        return tape.gradient(y, x)

    assert run(strategy, fn, np.float32(3)) == 6.0


def test_values_made_on_the_way(strategy, v):
    def fn():
        with GradientTape() as tape:
            hidden = v * 2
            out = hidden * hidden * v
        return tape.gradient(out, [hidden, v])

    # d out / d hidden = 2 hidden v; d out / d v counts the way through hidden too.
    assert run(strategy, fn) == [36.0, 108.0]


def test_assigned_values(strategy, v, w):
    def fn():
        with GradientTape() as tape:
            w.assign(v * 4)
            y = w * w
        return tape.gradient(y, v)

    assert run(strategy, fn) == 96.0
    assert float(w.value) == 12.0


def test_gradient_inside_the_with_block(strategy, v):
    def fn():
        with GradientTape() as tape:
            return tape.gradient(v * v, v)

    assert run(strategy, fn) == 6.0


def test_second_order(strategy, v):
    def fn():
        with GradientTape() as outer:
            with GradientTape() as inner:
                y = v * v * v
            first = inner.gradient(y, v)
        return first, outer.gradient(first, v)

    assert run(strategy, fn) == (27.0, 18.0)


def test_third_order_through_persistent_tapes(strategy, v):
    def fn():
        with GradientTape() as a:
            with GradientTape() as b:
                with GradientTape(persistent=True) as c:
                    y = v * v * v * v
                first = c.gradient(y, v)
            second = b.gradient(first, v)
        return second, a.gradient(second, v)

    assert run(strategy, fn) == (108.0, 72.0)


def test_gradient_penalty(strategy, v):
    """The gradient by an input, as a part of the loss: needs both tapes in one forward pass."""

    def fn(x):
        with GradientTape() as outer:
            with GradientTape() as inner:
                inner.watch(x)
                y = v * x * x
            penalty = inner.gradient(y, x) ** 2
            loss = y + penalty
        return outer.gradient(loss, v)

    # loss = v x^2 + (2 v x)^2
    assert run(strategy, fn, np.float32(2)) == 4 + 8 * 3 * 4


def test_two_tapes_side_by_side(strategy, v, w):
    """As in a GAN: two losses of one forward pass, each with its own tape."""

    def fn():
        with GradientTape() as one, GradientTape() as two:
            shared = v * w
            first, second = shared * 2, shared * shared
        return one.gradient(first, v), two.gradient(second, w)

    assert run(strategy, fn) == (4.0, 36.0)


def test_updates_between_two_tapes(strategy, v):
    def fn():
        with GradientTape() as tape:
            y = v * v
        v.assign_sub(tape.gradient(y, v))
        with GradientTape() as tape:
            y = v * v
        return tape.gradient(y, v)

    assert run(strategy, fn) == -6.0


def test_side_effects_inside_the_tape_run_once(strategy, v):
    with strategy.scope():
        calls = keras.Variable(0.0, trainable=False)

    def fn():
        with GradientTape() as tape:
            calls.assign_add(1.0)
            y = v * v
        return tape.gradient(y, v)

    run(strategy, fn)
    assert float(calls.value) == 1.0


def test_loops_and_jit_inside(strategy, v):
    def fn():
        with GradientTape() as tape:
            y, _ = jax.lax.scan(lambda c, _: (c * v.value, None), jnp.float32(1), length=3)
            y = jax.jit(lambda a: a * 2)(y)
        return tape.gradient(y, v)

    assert run(strategy, fn) == 54.0


def test_custom_gradients_are_used(strategy, v):
    @jax.custom_vjp
    def clipped(x):
        return x * 10

    clipped.defvjp(lambda x: (x * 10, None), lambda _, g: (jnp.clip(g, -1, 1),))

    def fn():
        with GradientTape() as tape:
            y = clipped(v.value) * 7
        return tape.gradient(y, v)

    assert run(strategy, fn) == 1.0


def test_watched_variables(strategy, v, w):
    with strategy.scope():
        still = keras.Variable(1.0, trainable=False)
        other = keras.Variable(1.0)

    def names(tape):
        return [("v", "w", "still", "other")[[id(x) for x in (v, w, still, other)].index(id(y))]
                for y in tape.watched_variables()]  # fmt: skip

    def fn():
        before = other + 1
        with GradientTape() as tape, GradientTape(watch_accessed_variables=False) as told:
            y = v * still * v
            inside = names(tape)
            y = y * w
            told.watch([still, still])
        grads = tape.gradient(y, tape.watched_variables())
        return inside, names(tape), names(told), grads, before + other

    inside, found, told, grads, _ = run(strategy, fn)
    assert (inside, found, told) == (["v"], ["v", "w"], ["still"])
    assert grads == (12.0, 9.0)
    assert not GradientTape().watched_variables()


def test_reset(strategy, v, w):
    def fn():
        with GradientTape(persistent=True) as tape:
            before = v * w
            tape.reset()
            assert not tape.watched_variables()
            y = v * v
        assert [id(x) for x in tape.watched_variables()] == [id(v)]
        return tape.gradient(y, [v, w]), tape.gradient(before, [v])

    assert run(strategy, fn) == ([6.0, None], [None])


def test_reset_outside_of_the_block(strategy, v):
    def fn():
        with GradientTape() as tape:
            y = v * v
        tape.reset()
        return tape.gradient(y, v)

    with pytest.raises(RuntimeError, match="Expected tape.reset in the `with` block.*Make a new"):
        strategy.run(fn)
    with pytest.raises(RuntimeError, match=r"Expected tape.reset in the `with` block"):
        GradientTape().reset()


@pytest.mark.parametrize(
    ("call", "instead"),
    [
        (lambda t, y, x: t.jacobian(y, x), r"Got tape.jacobian.*Use jax.jacobian\(fn\)"),
        (lambda t, y, x: t.batch_jacobian(y, x), r"Got tape.batch_jacobian.*Use jax.vmap\(jax.jac"),
        (lambda t, y, x: t.stop_recording(), r"Got tape.stop_recording.*jax.lax.stop_gradient"),
    ],
)
def test_what_a_tape_cannot_says_what_can(strategy, v, call, instead):
    def fn():
        with GradientTape() as tape:
            y = v * v
            call(tape, y, v)

    with pytest.raises(NotImplementedError, match=instead):
        strategy.run(fn)


def test_value_and_grad(strategy, v, w):
    def loss(x):
        return v * v * x, {"w": w * 1.0}

    def fn(x):
        return stratagem.value_and_grad(loss, [v, w], has_aux=True)(x)

    (value, aux), grads = run(strategy, fn, np.float32(2))
    assert (value, aux, grads) == (18.0, {"w": 2.0}, [12.0, None])
    plain = stratagem.value_and_grad(lambda x, scale: v * x * scale, [v])
    assert run(strategy, lambda x: plain(x, scale=2.0), np.float32(2)) == (12.0, [4.0])


def test_rows_of_which_some_classes_ignore_a_variable(strategy, v):
    """A replica without rows may leave a variable out; its gradient is then zero, not missing."""

    def fn(x):
        with GradientTape() as tape:
            loss = jnp.sum(v * x) if x.shape[0] else jnp.zeros(())
        grad = tape.gradient(loss, v)
        return stratagem.get_replica_context().all_reduce("SUM", grad)

    parts = stratagem.PerReplica([np.ones(2, "float32"), np.ones(0, "float32")])
    assert run(strategy, fn, parts) == 2.0


def test_without_a_strategy():
    variable = keras.Variable(3.0)

    @stratagem.function
    def fn():
        with GradientTape() as tape:
            y = variable * variable
        return tape.gradient(y, variable)

    assert float(fn()) == 6.0


# Errors.


def test_outside_a_traced_function():
    with pytest.raises(RuntimeError, match="Expected GradientTape inside a function that"):
        GradientTape().__enter__()


def test_gradient_in_another_call(strategy, v):
    kept = []

    def record():
        with GradientTape() as tape:
            kept.append((tape, v * v))

    strategy.run(record)
    tape, y = kept[-1]
    with pytest.raises(RuntimeError, match="in the traced call that entered the tape"):
        tape.gradient(y, v)
    with pytest.raises(RuntimeError, match="in the traced call that entered the tape"):
        strategy.run(lambda: tape.gradient(y, v))


def test_gradient_of_a_tape_that_was_not_entered(strategy, v):
    with pytest.raises(RuntimeError, match="in the traced call that entered the tape"):
        strategy.run(lambda: GradientTape().gradient(v * v, v))


def test_second_call_of_a_tape_that_is_not_persistent(strategy, v):
    def fn():
        with GradientTape() as tape:
            y = v * v
        return tape.gradient(y, v), tape.gradient(y, v)

    with pytest.raises(RuntimeError, match=r"Got a second one.*persistent=True"):
        strategy.run(fn)


def gradient_with(strategy, v, **options):
    def fn():
        with GradientTape() as tape:
            y = v * v
        return tape.gradient(y, v, **options)

    return strategy.run(fn)


def test_unconnected_gradients_option(strategy, v):
    with pytest.raises(ValueError, match="unconnected_gradients of 'none' or 'zero'. Got 'nul'"):
        gradient_with(strategy, v, unconnected_gradients="nul")


def test_number_of_output_gradients(strategy, v):
    with pytest.raises(ValueError, match="Expected one output gradient a target, 1. Got 2"):
        gradient_with(strategy, v, output_gradients=[1.0, 2.0])


def test_shape_of_output_gradients(strategy, v):
    with pytest.raises(ValueError, match=r"target 0: shape \(\), output gradient \(3,\)"):
        gradient_with(strategy, v, output_gradients=[jnp.ones(3)])


def test_targets_that_are_not_floats(strategy, v):
    def fn(target):
        with GradientTape() as tape:
            y = [v * v, jnp.argmax(v.value[None])] if target else []
        return tape.gradient(y, v)

    with pytest.raises(ValueError, match="float tensors to differentiate. Got target 1: int32"):
        strategy.run(fn, (True,))
    with pytest.raises(ValueError, match="float tensors to differentiate. Got no target"):
        strategy.run(fn, (False,))


@pytest.mark.parametrize("how", ["scan", "jit", "cond"])
def test_tape_inside_a_loop(strategy, v, how):
    def body(carry, _=None):
        with GradientTape() as tape:
            y = carry * carry
        return carry + tape.gradient(y, carry), None

    def fn():
        if how == "scan":
            return jax.lax.scan(body, jnp.float32(1), length=2)[0]
        if how == "jit":
            return jax.jit(body)(jnp.float32(1))[0]
        return jax.lax.cond(v.value > 0, lambda: body(jnp.float32(1))[0], lambda: jnp.float32(0))

    with pytest.raises(RuntimeError, match=f"top level of a step. Got one inside .*{how}"):
        strategy.run(fn)


def test_gradient_inside_a_loop_of_a_tape_outside(strategy, v):
    def fn():
        with GradientTape(persistent=True) as tape:
            y = v * v

        def body(carry, _):
            return carry + tape.gradient(y, v), None

        return jax.lax.scan(body, jnp.float32(0), length=2)[0]

    with pytest.raises(RuntimeError, match="top level of a step. Got one inside 'scan'"):
        strategy.run(fn)
