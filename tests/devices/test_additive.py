"""The proof that an update only adds to the old state, and the trials that rows add up."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from stratagem.keras_bridge.additive import adds_over_rows, adds_to_old_state

STATE = jax.ShapeDtypeStruct((), "float32")
ROWS = jax.ShapeDtypeStruct((4, 3), "float32")


def proven(update, count: int = 1) -> bool:
    return adds_to_old_state(jax.make_jaxpr(update)(*[STATE] * count, ROWS), count)


ADDS = {
    "unchanged": lambda old, x: [old],
    "sum": lambda old, x: [old + x.sum()],
    "swapped": lambda old, x: [x.max() + old],
    "minus": lambda old, x: [old - x.sum()],
    "twice": lambda old, x: [(old + x.sum()) + x.max()],
    "jitted": lambda old, x: [jax.jit(jnp.add)(old, x.sum())],
    "scatter": lambda old, x: [jnp.reshape(old, (1,)).at[0].add(x.sum())[0]],
    "a loop over the rows": lambda old, x: [
        old + jax.lax.fori_loop(0, 4, lambda i, s: s + x[i, 0], 0.0)
    ],
    "a branch on the rows": lambda old, x: [
        jax.lax.cond(x[0, 0] > 0, lambda o: o + x.sum(), lambda o: o - 1, old)
    ],
    "a choice by the rows": lambda old, x: [jnp.where(x.max() > 0, old + x.sum(), old)],
}
DOES_NOT = {
    "overwritten": lambda old, x: [x.mean()],
    "largest": lambda old, x: [jnp.maximum(old, x.max())],
    "decayed": lambda old, x: [0.9 * old + x.sum()],
    "doubled": lambda old, x: [old + old],
    "negated": lambda old, x: [x.sum() - old],
    "a choice by the state": lambda old, x: [jnp.where(old > 0, old + x.sum(), old)],
    "a branch on the state": lambda old, x: [
        jax.lax.cond(old > 0, lambda o: o + 1.0, lambda o: o, old)
    ],
    "a loop over the state": lambda old, x: [
        jax.lax.fori_loop(0, 3, lambda i, s: s + x[i, 0], old)
    ],
}


@pytest.mark.parametrize("name", [n for n in ADDS if n != "scatter"])
def test_updates_that_only_add_are_proven(name):
    assert proven(ADDS[name])


@pytest.mark.parametrize("name", DOES_NOT)
def test_updates_that_look_at_the_old_state_are_not(name):
    assert not proven(DOES_NOT[name])


def test_scattered_counts_are_proven():
    def update(old, x):
        return [old.at[x.astype(int)[:, 0]].add(1.0)]

    state = jax.ShapeDtypeStruct((5,), "float32")
    assert adds_to_old_state(jax.make_jaxpr(update)(state, ROWS), 1)


def test_each_result_must_continue_its_own_state():
    assert proven(lambda a, b, x: [a + x.sum(), b + 1], count=2)
    assert not proven(lambda a, b, x: [b + x.sum(), a + 1], count=2)
    assert not proven(lambda a, b, x: [a + b, b + 1], count=2)


def tried(update, *leaves) -> bool:
    return adds_over_rows(update, [STATE], leaves or [ROWS])


def test_rows_add_up():
    assert tried(lambda s, x: [s[0] + x[0].sum()])
    assert tried(lambda s, x: [s[0] + x[0].shape[0]])
    assert tried(lambda s, x: [s[0] + (x[0] > 0.5).sum()])
    labels = jax.ShapeDtypeStruct((4,), "int32")
    assert tried(lambda s, x: [s[0] + (x[1].argmax(-1) == x[0]).sum()], labels, ROWS)


def test_rows_do_not_add_up():
    assert not tried(lambda s, x: [s[0] + x[0].mean()])
    assert not tried(lambda s, x: [s[0] + 1])
    assert not tried(lambda s, x: [s[0] + x[0].sum() ** 2])
    assert not tried(lambda s, x: [s[0] + x[0].std(axis=0).sum()])


def test_what_cannot_be_tried_is_not_summed():
    def refuses(state, leaves):
        raise ValueError("four rows, please")

    assert not tried(refuses)
    assert not tried(lambda s, x: [s[0] + jnp.log(-x[0]).sum()])  # NaN


def test_large_tensors_are_tried_in_small():
    seen = []

    def update(state, leaves):
        seen.append(leaves[0].shape)
        return [state[0] + leaves[0].sum()]

    assert tried(update, jax.ShapeDtypeStruct((8, 1024, 50_000), "float32"))
    assert max(shape[1] * shape[2] for shape in seen) == 16 * 16
