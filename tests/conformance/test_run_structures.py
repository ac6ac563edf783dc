"""Section 2.2: what goes into run, what comes out of it, and merge_call."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem
from conformance.table import Each, each, make, parts, plain, replica_id, variable
from stratagem import IndexedSlices, Mirrored, PerReplica

Pair = collections.namedtuple("Pair", ["left", "right"])


@pytest.fixture(params=["default", "one", "two", "three"])
def strategy(request):
    return make(request.param)


@pytest.fixture
def two():
    return make("two")


def test_leaves_of_nested_arguments_are_replaced(strategy):
    n = strategy.num_replicas_in_sync
    given = {"x": parts(strategy, [1, 2, 3]), "rest": (parts(strategy, [4, 5, 6]), [7, None])}
    seen = []

    def step(tree, *, scale):
        seen.append(tree["rest"][1])
        return {"sum": (tree["x"] + tree["rest"][0]) * scale, "rest": tree["rest"][1]}

    result = strategy.run(step, args=(given,), kwargs={"scale": np.float32(2)})
    assert plain(result) == {"sum": each(n, lambda r: 10.0 + 4.0 * r), "rest": [7, None]}
    assert seen[-1] == [7, None]


def test_structures_of_results_are_kept(strategy):
    n = strategy.num_replicas_in_sync

    def step():
        one = jnp.asarray(replica_id() + 1)
        return Pair(one, {"a": [one, 5], "b": (None, "text")})

    result = strategy.run(step)
    ids = each(n, lambda r: r + 1)
    assert isinstance(result, Pair)
    assert plain(result.left) == ids
    assert plain(result.right) == {"a": [ids, 5], "b": [None, "text"]}
    assert isinstance(result.right["b"], tuple)


def test_one_replica_gives_plain_tensors():
    for name in ("default", "one"):
        assert isinstance(make(name).run(lambda: jnp.ones(2)), jax.Array)


def test_python_objects_come_back_as_they_are(strategy):
    thing = object()
    assert strategy.run(lambda x: x, (thing,)) is thing


def test_variables_pass_through_whole(strategy):
    var = variable(strategy, "sum")
    assert strategy.run(lambda v: v, (var,)) is var
    assert plain(strategy.run(lambda v: v + 1.0, (var,))) == each(
        strategy.num_replicas_in_sync, lambda _: 11.0
    )


def test_mirrored_arguments_are_their_value(two):
    assert plain(two.run(lambda x: x + 1, (Mirrored([np.float32(1)] * 2),))) == Each([2.0, 2.0])


def test_python_numbers_are_constants_of_the_program(strategy):
    traced = []

    def step(x, times):
        traced.append(times)
        for _ in range(times):  # a Python loop: the number is known while tracing
            x = x * 2
        return x

    n = strategy.num_replicas_in_sync
    for times in (2, 3, 2):
        result = strategy.run(step, (np.float32(1), times))
        assert plain(result) == each(n, lambda _, t=times: 2.0**t)
    assert set(traced) == {2, 3}


def test_random_keys_go_in_and_come_out(two):
    def step(key):
        own = jax.random.fold_in(key, replica_id())
        return own, jax.random.uniform(own)

    keys, draws = two.run(step, (jax.random.key(7),))
    expected = [jax.random.fold_in(jax.random.key(7), r) for r in range(2)]
    assert [bool(a == b) for a, b in zip(keys.values, expected, strict=True)] == [True, True]
    assert plain(draws) == Each([float(jax.random.uniform(key)) for key in expected])
    assert plain(two.run(jax.random.uniform, (keys,))) == plain(draws)


def test_structured_parts_are_opened(two):
    dicts = PerReplica([{"a": 1, "b": [2.0]}, {"a": 3, "b": [4.0]}])
    assert plain(two.run(lambda d: (d["a"], d["b"][0]), (dicts,))) == [
        Each([1, 3]),
        Each([2.0, 4.0]),
    ]
    values = two.experimental_distribute_values_from_function(
        lambda ctx: {"id": ctx.replica_id_in_sync_group}
    )
    assert plain(values) == {"id": Each([0, 1])}


def test_indexed_slices_go_in_and_come_out(two):
    slices = PerReplica(
        [IndexedSlices(np.full((1, 2), i, np.float32), np.array([i]), (3, 2)) for i in (1, 2)]
    )
    doubled = two.run(lambda s: IndexedSlices(s.values * 2, s.indices, s.dense_shape), (slices,))
    assert isinstance(doubled, PerReplica)
    assert plain(doubled) == Each([[[1], [[2.0, 2.0]]], [[2], [[4.0, 4.0]]]])
    dense = [[0.0, 0.0], [2.0, 2.0], [4.0, 4.0]]
    assert plain(two.reduce("SUM", doubled, axis=None)) == dense

    @stratagem.function
    def whole(x):
        return two.reduce("SUM", two.run(lambda s: s, (x,)), axis=None)

    assert plain(whole(slices)) == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


def test_options_are_accepted(strategy):
    assert strategy.run(lambda: 3, options=object()) == 3


def test_an_exception_comes_out_and_changes_nothing(strategy):
    var = variable(strategy, "sum")

    def step():
        var.assign_add(1.0)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        strategy.run(step)
    assert var.numpy() == 10.0
    assert not stratagem.has_strategy()


def test_a_variable_made_in_the_function_is_made_once(strategy):
    made = []

    def step():
        if not made:
            made.append(keras.Variable(2.0, aggregation="sum", trainable=False))
        made[0].assign_add(1.0)
        return made[0].value

    n = strategy.num_replicas_in_sync
    assert plain(strategy.run(step)) == each(n, lambda _: 2.0 + n)
    assert plain(strategy.run(step)) == each(n, lambda _: 2.0 + 2 * n)
    assert len(made) == 1
    if strategy is not stratagem.get_strategy():
        assert strategy.extended.variable_created_in_scope(made[0])


def test_merge_call_sees_all_and_gives_each_its_part(strategy):
    n = strategy.num_replicas_in_sync
    seen = []

    def merge(merging, tree, *, scale):
        seen.append((merging is strategy, tree["python"]))
        total = merging.reduce("SUM", tree["x"], axis=None)
        return {"own": tree["x"], "total": total * scale, "python": "same"}

    def step(x):
        ctx = stratagem.get_replica_context()
        result = ctx.merge_call(merge, ({"x": x, "python": 3},), {"scale": 2})
        return {**result, "more": result["own"] + result["total"]}

    result = strategy.run(step, (parts(strategy, [1, 2, 3]),))
    total = n * (n + 1.0)
    assert plain(result) == {
        "own": each(n, lambda r: r + 1.0),
        "total": each(n, lambda _: total),
        "python": "same",
        "more": each(n, lambda r: r + 1.0 + total),
    }
    assert seen == [(True, 3)]


def test_merge_call_updates_and_runs_again(strategy):
    n = strategy.num_replicas_in_sync
    var = variable(strategy, "none")

    def merge(merging, x):
        total = merging.extended.reduce_to("SUM", x, var)
        merging.extended.update(var, lambda v, t: v.assign_sub(t), args=(total,))
        return merging.run(lambda y: y * 10, (x,))

    result = strategy.run(
        lambda x: stratagem.get_replica_context().merge_call(merge, (x,)),
        (parts(strategy, [1, 2, 3]),),
    )
    assert plain(result) == each(n, lambda r: 10.0 * (r + 1))
    assert var.numpy() == 10.0 - n * (n + 1) / 2


def test_merge_call_gathers_uneven_parts(two):
    result = two.run(
        lambda x: stratagem.get_replica_context().merge_call(
            lambda merging, y: merging.gather(y, axis=0), (x,)
        ),
        (parts(two, [[1, 2], [3]]),),
    )
    assert plain(result) == Each([[1.0, 2.0, 3.0]] * 2)


def test_nested_structures_are_reduced_together(strategy):
    n = strategy.num_replicas_in_sync

    def step(x):
        ctx = stratagem.get_replica_context()
        summed = ctx.all_reduce("SUM", {"a": x, "b": [x * 2, (jnp.ones(2, jnp.int32),)]})
        gathered = ctx.all_gather({"a": x[None], "b": (jnp.stack([x, x])[None],)}, axis=-1)
        return summed, gathered

    summed, gathered = strategy.run(step, (parts(strategy, [1, 2, 3]),))
    total, ranks = n * (n + 1) / 2, [r + 1.0 for r in range(n)]
    assert plain(summed) == {
        "a": each(n, lambda _: total),
        "b": [each(n, lambda _: 2 * total), [each(n, lambda _: [n, n])]],
    }
    assert plain(gathered) == {
        "a": each(n, lambda _: ranks),
        "b": [each(n, lambda _: [[x for r in ranks for x in (r, r)]])],
    }


def test_all_reduce_in_loops_jit_vmap_and_grad(two):
    def total(x):
        return stratagem.get_replica_context().all_reduce("SUM", x)

    def step(x):
        return (
            jax.lax.fori_loop(0, 3, lambda _, y: total(y), x),
            jax.jit(total)(x),
            jax.vmap(total)(jnp.stack([x, x + 1])),
            jax.grad(lambda y: total(y * y))(x),
        )

    result = two.run(step, (parts(two, [1, 2]),))
    assert plain(result) == [
        Each([12.0] * 2),
        Each([3.0] * 2),
        Each([[3.0, 5.0]] * 2),
        Each([4.0, 8.0]),
    ]


def test_all_reduce_means_of_integers_are_float32(two):
    result = two.run(
        lambda x: stratagem.get_replica_context().all_reduce("MEAN", x), (PerReplica([1, 2]),)
    )
    assert plain(result) == Each([1.5, 1.5])
    assert result.stacked.dtype == np.float32


def test_lower_is_the_program_that_run_runs(strategy):
    var = variable(strategy, "sum")

    def step(x):
        var.assign_add(keras.ops.sum(x))

    lowered = strategy.lower(step, (parts(strategy, [[1, 2], [3, 4], [5, 6]]),))
    assert isinstance(lowered, jax.stages.Lowered)
    assert var.numpy() == 10.0
    collectives = lowered.as_text().count("stablehlo.all_reduce")
    assert collectives == (1 if strategy.num_replicas_in_sync > 1 else 0)
    strategy.run(step, (parts(strategy, [[1, 2], [3, 4], [5, 6]]),))
    assert var.numpy() == 10.0 + sum(range(1, 2 * strategy.num_replicas_in_sync + 1))
