"""A program in two parts: which equation goes where, and that both compute what the whole does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stratagem.step import primitives
from stratagem.step.split import Source, Split, split

STATE, SHARED, DATA = Source.STATE, Source.SHARED, Source.DATA
F32 = jax.ShapeDtypeStruct((3,), np.float32)


def arrived(x: Any) -> Any:
    return primitives.mark_p.bind(x, kind="arrived", key=None)


def of(fn: Any, *inputs: Source, own: tuple[int, ...] = ()) -> tuple[Any, Split]:
    closed = jax.make_jaxpr(fn)(*(F32 for _ in inputs))
    return closed, split(closed, inputs, own)


def names(closed: Any) -> list[str]:
    return [eqn.primitive.name for eqn in closed.jaxpr.eqns]


def check_same(closed: Any, parts: Split) -> None:
    """Both parts, one after the other, give what the whole gives."""
    random = np.random.default_rng(0)
    inputs = [random.normal(size=v.aval.shape).astype("float32") for v in closed.jaxpr.invars]

    def run(part: Any, values: list[Any]) -> list[Any]:
        return jax.jit(lambda *xs: jax.core.eval_jaxpr(part.jaxpr, part.consts, *xs))(*values)

    whole = run(closed, inputs)
    theirs = run(parts.replica, [inputs[i] for i in parts.reads])
    own, handed = theirs[: len(parts.own)], theirs[len(parts.own) :]
    late = iter(run(parts.update, [*handed, *(inputs[i] for i in parts.keeps)]))
    mine = dict(zip(parts.own, own, strict=True))
    for i, expected in enumerate(whole):
        np.testing.assert_allclose(mine[i] if i in mine else next(late), expected, rtol=1e-6)


def step(weight: Any, slot: Any, rate: Any, x: Any) -> Any:
    """A loss, a gradient, and an update with momentum."""
    loss, gradient = jax.value_and_grad(lambda w: jnp.sum((w * x) ** 2))(weight)
    new = 0.9 * slot + arrived(gradient)
    return loss, weight - rate * new, new


def test_a_training_step_is_cut_where_the_gradient_has_met():
    closed, parts = of(step, STATE, STATE, SHARED, DATA, own=(0,))
    assert parts.reads == [0, 3]  # the weight and the data: neither slot nor rate
    assert parts.own == [0]
    assert [v.aval.shape for v in parts.handed] == [(3,)]  # the gradient alone
    assert parts.keeps == [0, 1, 2]
    assert set(names(parts.update)) == {"mul", "add", "sub"}
    check_same(closed, parts)


def test_a_lone_replica_is_cut_there_too_when_its_batch_looks_like_any_argument():
    closed, parts = of(step, STATE, STATE, SHARED, SHARED, own=(0,))
    assert (parts.reads, parts.keeps) == ([0, 3], [0, 1, 2])
    check_same(closed, parts)


def test_values_met_in_the_middle_stay_where_the_replicas_need_them():
    def normalized(weight: Any, mean: Any, x: Any) -> Any:
        batch_mean = arrived(x * 0.5)
        return arrived((x - batch_mean) * weight), 0.9 * mean + 0.1 * batch_mean

    closed, parts = of(normalized, STATE, STATE, DATA)
    assert parts.reads == [0, 2]  # the moving mean is the update's
    assert len(parts.handed) == 2
    assert "sub" in names(parts.replica)
    assert "sub" not in names(parts.update)
    check_same(closed, parts)


def test_what_only_variables_say_is_computed_where_it_is_needed():
    def fn(weight: Any, other: Any, x: Any) -> Any:
        half, double = weight * 0.5, other * 2.0
        return arrived(half * x), half, double

    closed, parts = of(fn, STATE, STATE, DATA)
    assert parts.reads == [0, 2]
    assert len(parts.handed) == 2  # the gradient, and `half`, which both need
    assert parts.keeps == [1]
    check_same(closed, parts)


def test_an_argument_that_is_stored_as_it_is():
    closed, parts = of(lambda old, same, own: (same, own), STATE, SHARED, DATA)
    assert (parts.reads, parts.keeps, len(parts.handed)) == ([2], [1], 1)
    check_same(closed, parts)


def test_predictions_have_no_update():
    closed, parts = of(lambda w, x: w * x, STATE, DATA, own=(0,))
    assert names(parts.update) == []
    assert parts.keeps == []
    assert parts.handed == []
    check_same(closed, parts)


def test_writes_that_need_no_data_have_no_replicas_part():
    closed, parts = of(lambda count: count + 1.0, STATE)
    assert names(parts.replica) == []
    assert parts.reads == []
    check_same(closed, parts)


@pytest.mark.parametrize("what", ["id", "loop"])
def test_what_only_a_replica_can_compute_is_the_replicas(what):
    def inside(w: Any) -> Any:
        meet = {"ops": ("sum",), "via": None, "replicas": 2, "weight": None}
        body = lambda carry, _: (primitives.all_reduce_p.bind(carry, **meet)[0], None)  # noqa: E731
        return jax.lax.scan(body, w, length=2)[0]

    fn = inside if what == "loop" else lambda w: w * primitives.replica_id_p.bind()
    _, parts = of(fn, STATE)
    assert parts.reads == [0]
    assert names(parts.update) == []
    assert len(parts.handed) == 1


def test_messages_are_printed_once_by_the_part_that_has_the_value():
    def fn(w: Any, x: Any) -> Any:
        jax.debug.print("{}", w)
        gradient = arrived(w * x)
        jax.debug.print("{}", gradient)
        return w - gradient

    _, parts = of(fn, STATE, DATA)
    for part in (parts.replica, parts.update):
        assert sum("debug" in name for name in names(part)) == 1
