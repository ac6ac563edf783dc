"""Law 2: mirrored variables stay the same on all replicas, bit for bit, or the step is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem
from conformance.table import rehearsed_tpu
from stratagem.errors import ReplicaBranchError, ReplicaDependentWriteError


@pytest.fixture(scope="module", params=["mirrored", "tpu"])
def strategy(request):
    if request.param == "tpu":
        return rehearsed_tpu(3)
    return stratagem.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])


def make(strategy, name="v", **options):
    with strategy.scope():
        return keras.Variable(1.0, name=name, **{"trainable": False, **options})


def replica_id():
    return stratagem.get_replica_context().replica_id_in_sync_group


def own():
    """1.0, 2.0, 3.0 on the replicas."""
    return jnp.float32(1) + replica_id()


def copies(array):
    """The bytes of each device's copy."""
    return [np.asarray(shard.data).tobytes() for shard in array.addressable_shards]


def assert_mirrored(*variables):
    for variable in variables:
        parts = copies(variable.value)
        assert len(parts) > 1
        assert len(set(parts)) == 1, variable.path


# What a step may write to a variable with aggregation NONE.


def test_the_error_names_all_offenders_and_the_choices(strategy):
    a, b, fine = (make(strategy, name) for name in ("first", "second", "fine"))

    def fn():
        a.assign(own())
        fine.assign(2.0)
        b.assign_add(own() * 2)

    with pytest.raises(ReplicaDependentWriteError) as caught:
        strategy.run(fn)
    text = str(caught.value)
    assert "replica-dependent values for 2 variable(s)" in text
    assert "'first' (shape (), float32, aggregation 'none', synchronization 'auto')" in text
    assert "'second'" in text
    assert "'fine'" not in text
    for choice in ("'sum'", "'mean'", "'only_first_replica'", "'on_read'", "all_reduce"):
        assert choice in text
    assert [float(v.value) for v in (a, b, fine)] == [1.0, 1.0, 1.0]  # nothing was written


def double_in_scan(x):
    return jax.lax.scan(lambda c, _: (c * 2, None), x, length=2)[0]


def swap_in_scan(x):
    """The varying value needs two rounds to reach the first place of the carry."""

    def body(carry, _):
        a, b, c = carry
        return (b, c, c), None

    return jax.lax.scan(body, (jnp.float32(0), jnp.float32(0), x), length=3)[0][0]


def stack_in_scan(x):
    return jax.lax.scan(lambda c, _: (c, c + x), jnp.float32(0), length=2)[1].sum()


def count_in_while(x):
    """Only the number of rounds depends on the replica."""
    return jax.lax.while_loop(lambda c: c[0] < x, lambda c: (c[0] + 1, c[1] + 1), (0.0, 0.0))[1]


@jax.custom_vjp
def with_own_gradient(x):
    return x * 2


with_own_gradient.defvjp(lambda x: (x * 2, None), lambda _, g: (g,))


@jax.custom_jvp
def with_own_tangent(x):
    return x * 2


with_own_tangent.defjvp(lambda p, t: (p[0] * 2, t[0]))

ROADS = {
    "directly": lambda x: x,
    "arithmetic": lambda x: x * 0 + 1,
    "scan carry": double_in_scan,
    "scan carry, after two rounds": swap_in_scan,
    "scan output": stack_in_scan,
    "while carry": lambda x: jax.lax.while_loop(lambda c: c < 100, lambda c: c * 2, x),
    "number of rounds": count_in_while,
    "fori": lambda x: jax.lax.fori_loop(0, 3, lambda _, c: c + x, 0.0),
    "cond branch": lambda x: jax.lax.cond(jnp.array(True), lambda: x, lambda: 0.0),
    "cond choice": lambda x: jax.lax.cond(x > 1, lambda: 1.0, lambda: 0.0),
    "switch choice": lambda x: jax.lax.switch(x.astype(int), [lambda: 1.0, lambda: 2.0]),
    "where": lambda x: jnp.where(x > 1, 1.0, 0.0),
    "jit": lambda x: jax.jit(lambda a: a + 1)(x),
    "id inside jit": lambda _: jax.jit(lambda: replica_id() * 1.0)(),
    "id inside scan": lambda _: jax.lax.scan(
        lambda c, _: (c + replica_id(), None), jnp.float32(0), length=2
    )[0],
    "id inside cond": lambda _: jax.lax.cond(
        jnp.array(True), lambda: replica_id() * 1.0, lambda: 0.0
    ),
    "remat": lambda x: jax.checkpoint(lambda a: jnp.sin(a))(x),
    "custom_vjp": with_own_gradient,
    "custom_jvp": with_own_tangent,
    "vmap": lambda x: jax.vmap(lambda a: a + x)(jnp.arange(2.0)).sum(),
    "gradient": lambda x: jax.grad(lambda a: a * x)(2.0),
    "random": lambda x: jax.random.normal(jax.random.key(x.astype(int)), ()),
    "host": lambda x: jax.pure_callback(
        lambda a: np.asarray(a), jax.ShapeDtypeStruct((), "float32"), x
    ),
    "host alone": lambda _: jax.experimental.io_callback(
        lambda: np.float32(1), jax.ShapeDtypeStruct((), "float32")
    ),
    "index": lambda x: jnp.arange(4.0)[x.astype(int)],
}


@pytest.mark.parametrize("road", ROADS)
def test_a_varying_value_is_refused_on_every_road(strategy, road):
    v = make(strategy)
    with pytest.raises(ReplicaDependentWriteError, match="'v'"):
        strategy.lower(lambda: v.assign(ROADS[road](own())))


def test_a_batch_varies(strategy):
    v = make(strategy)
    batch = stratagem.PerReplica([np.ones(2, "float32")] * 3)
    with pytest.raises(ReplicaDependentWriteError, match="'v'"):
        strategy.run(lambda x: v.assign(jnp.sum(x)), (batch,))


def test_a_component_varies(strategy):
    v = make(strategy)
    component = make(strategy, "component", aggregation="sum", synchronization="on_read")
    with pytest.raises(ReplicaDependentWriteError, match="'v'"):
        strategy.run(lambda: v.assign(component.value))


def test_through_another_variable(strategy):
    v, w = make(strategy, "v"), make(strategy, "w")

    def fn():
        w.assign(own())
        v.assign(w.value * 2)

    with pytest.raises(ReplicaDependentWriteError, match=r"2 variable\(s\)"):
        strategy.run(fn)


# What the host says cannot be proven to be the same, and an id never is.
OPEN = [r for r in ROADS if r != "host alone" and not r.startswith("id ")]


@pytest.mark.parametrize("road", OPEN)
def test_the_same_road_is_open_for_a_value_that_all_share(strategy, road):
    v = make(strategy)

    def fn():
        shared = stratagem.get_replica_context().all_reduce("SUM", own())
        v.assign(ROADS[road](shared))

    strategy.lower(fn)


def test_a_write_of_the_old_value_back_is_no_offence(strategy):
    v = make(strategy)

    def fn():
        before = v.value
        v.assign(own())
        v.assign(before + 1)

    strategy.run(fn)
    assert float(v.value) == 2.0


def test_shared_arguments_do_not_vary(strategy):
    v = make(strategy)
    strategy.run(lambda x, y: v.assign(x + y), (np.float32(2), stratagem.Mirrored([3.0, 3.0, 3.0])))
    assert float(v.value) == 5.0


def test_all_gather_makes_invariant(strategy):
    v = make(strategy)
    strategy.run(lambda: v.assign(stratagem.get_replica_context().all_gather(own()[None], 0)[1]))
    assert float(v.value) == 2.0
    assert_mirrored(v)


def test_gradients_that_were_not_reduced(strategy):
    v = make(strategy, trainable=True)

    def fn(x):
        with stratagem.GradientTape() as tape:
            loss = v * jnp.sum(x)
        v.assign_sub(tape.gradient(loss, v))

    batch = stratagem.PerReplica([np.ones(n, "float32") for n in (2, 2, 2)])
    with pytest.raises(ReplicaDependentWriteError, match="'v'"):
        strategy.run(fn, (batch,))


# Aggregations and synchronizations.


@pytest.mark.parametrize(
    ("aggregation", "assigned", "added"),
    [("sum", 6.0, 7.0), ("mean", 2.0, 3.0), ("only_first_replica", 1.0, 2.0)],
)
@pytest.mark.parametrize("synchronization", ["auto", "on_write"])
def test_aggregation_on_write(strategy, aggregation, synchronization, assigned, added):
    options = {"aggregation": aggregation, "synchronization": synchronization}
    v, w = make(strategy, "v", **options), make(strategy, "w", **options)

    def fn():
        v.assign(own())
        w.assign_add(own())
        return v.value, w.value

    seen = strategy.run(fn)
    assert [float(x) for x in seen[0].values] == [assigned] * 3
    assert float(v.value) == assigned
    assert float(w.value) == added
    assert_mirrored(v, w)


@pytest.mark.parametrize(
    ("aggregation", "read"), [("sum", 6.0), ("mean", 2.0), ("only_first_replica", 1.0)]
)
def test_aggregation_on_read(strategy, aggregation, read):
    v = make(strategy, aggregation=aggregation, synchronization="on_read")
    strategy.run(lambda: v.assign(own()))
    assert float(v.value) == read
    assert np.asarray(v.components).tolist() == [1, 2, 3]


def test_statistics_of_layers_are_averaged(strategy):
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.0)
        layer.build((None, 1))
    batch = stratagem.PerReplica([np.full((2, 1), x, "float32") for x in (1, 2, 6)])
    strategy.run(lambda x: layer(x, training=True), (batch,))
    assert np.asarray(layer.moving_mean).tolist() == [3.0]
    assert_mirrored(layer.moving_mean, layer.moving_variance)


# A collective that not all replicas reach would wait for ever.


@pytest.mark.parametrize("how", ["cond", "while"])
def test_collectives_behind_a_condition_that_varies(strategy, how):
    def reduce(x):
        return stratagem.get_replica_context().all_reduce("SUM", x)

    def fn():
        if how == "cond":
            return jax.lax.cond(replica_id() == 0, reduce, lambda x: x, own())
        return jax.lax.while_loop(lambda x: x < own(), lambda x: reduce(x), jnp.float32(0))

    with pytest.raises(
        ReplicaBranchError, match=f"Got one inside a '{how}' whose condition differs"
    ):
        strategy.run(fn)


def test_collectives_behind_a_condition_that_all_share(strategy):
    v = make(strategy)

    def fn():
        reduce = stratagem.get_replica_context().all_reduce
        total = jax.lax.cond(v.value > 0, lambda x: reduce("SUM", x), lambda x: x, own())
        _, many = jax.lax.scan(lambda c, _: (c, reduce("SUM", c + own())), total, length=2)
        return many

    assert [np.asarray(x).tolist() for x in strategy.run(fn).values] == [[24, 24]] * 3


# The copies really are the same, whatever combined them.

OPS = {
    "nccl": stratagem.NcclAllReduce,
    "nccl, 2 packs": lambda: stratagem.NcclAllReduce(num_packs=2),
    "hierarchical": stratagem.HierarchicalCopyAllReduce,
    "one device": stratagem.ReductionToOneDevice,
    "ring": stratagem.RingAllReduce,
    "tree": stratagem.TreeAllReduce,
    "doubling": stratagem.DoublingAllReduce,
}


@pytest.mark.parametrize("ops", OPS)
def test_copies_are_bit_identical_after_training(ops):
    """Five replicas, a last batch of 2 rows on the first two, and one of 1 row."""
    strategy = stratagem.MirroredStrategy([f"cpu:{i}" for i in range(5)], OPS[ops]())
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(17, 4)).astype("float32"), rng.normal(size=(17, 3)).astype("float32")
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(7, activation="tanh"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(3),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01, clipnorm=0.3), "mse", metrics=["mae"])
    model.fit(x, y, batch_size=5, epochs=1, verbose=0)  # 5, 5, 5 and 2 rows
    assert_mirrored(*model.variables, *model.optimizer.variables)

    def step(inputs, targets):
        with stratagem.GradientTape() as tape:
            losses = jnp.mean((model(inputs, training=True) - targets) ** 2, axis=-1)
            loss = stratagem.nn.compute_average_loss(losses)
        grads = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    batches = [(x[:7], y[:7]), (x[10:], y[10:])]  # each 2, 2, 2, 1 and no rows
    for batch in strategy.experimental_distribute_dataset(batches):
        strategy.run(step, args=batch)
    assert_mirrored(*model.variables, *model.optimizer.variables)
