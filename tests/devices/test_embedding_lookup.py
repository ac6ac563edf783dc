"""nn.embedding_lookup and embedding_lookup_sparse: eager, compiled, differentiated, in models."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem
from devices.served import Job, compare, train_step
from stratagem import nn
from stratagem.strategies.sharded import ShardedVariable

TABLE = np.arange(1.0, 11.0, dtype=np.float32).reshape(5, 2)


class Rows(ShardedVariable):
    """A sharded table that only exists outside of programs."""

    name, shape, dtype, shard_ranges = "rows", (5, 2), "float32", [(0, 2), (2, 4), (4, 5)]

    def __init__(self):
        self.reads = []

    def read(self, start, stop):
        self.reads.append((start, stop))
        return TABLE[start:stop]


def shards():
    return [keras.Variable(part) for part in np.split(TABLE, [2, 4])]


TABLES = {
    "variable": lambda: keras.Variable(TABLE),
    "array": lambda: TABLE,
    "shards": shards,
    "tuple": lambda: tuple(shards()),
    "one shard": lambda: [TABLE],
    "empty shard": lambda: [TABLE[:3], TABLE[:0], TABLE[3:]],
    "ShardedVariable": Rows,
    "views": lambda: Rows().variables,
}
tables = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES.keys())


@tables
def test_rows_as_in_tensorflow(table):
    assert nn.embedding_lookup(table(), [0, 3, 4]).tolist() == [[1, 2], [7, 8], [9, 10]]


@tables
@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (1, 1, 2)])
def test_ids_of_any_shape(table, shape):
    ids = np.random.default_rng(0).integers(0, 5, shape)
    found = nn.embedding_lookup(table(), ids)
    assert found.shape == (*shape, 2)
    assert np.array_equal(found, TABLE[ids])


def test_only_needed_rows_are_read():
    table = Rows()
    nn.embedding_lookup(table, np.array([[4, 1], [1, 4]]))
    assert sorted(table.reads) == [(1, 2), (4, 5)]


@tables
def test_large_rows_are_scaled_down(table):
    found = nn.embedding_lookup(table(), [0, 4], max_norm=5.0)
    assert np.allclose(found, [[1, 2], TABLE[4] * 5 / np.linalg.norm(TABLE[4])])


def test_a_row_of_zeros_has_a_norm_with_a_gradient():
    def loss(table):
        return nn.embedding_lookup(table, jnp.array([0]), max_norm=1.0).sum()

    assert jax.grad(loss)(jnp.zeros((2, 2))).tolist() == [[1, 1], [0, 0]]


def gathers(fn, *args):
    """Every gather of a program: (operand's shape, slice sizes)."""
    found = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "gather":
                dims = eqn.params["dimension_numbers"]
                assert (dims.collapsed_slice_dims, dims.start_index_map) == ((0,), (0,))
                found.append((eqn.invars[0].aval.shape, eqn.params["slice_sizes"]))
            if "jaxpr" in eqn.params:
                walk(eqn.params["jaxpr"].jaxpr)

    walk(jax.make_jaxpr(fn)(*args).jaxpr)
    return found


def test_a_compiled_lookup_is_a_gather_of_rows():
    ids = jnp.array([[0, 3], [4, 4]])
    assert gathers(nn.embedding_lookup, TABLE, ids) == [((5, 2), (1, 2))]
    parts = [TABLE[:2], TABLE[2:4], TABLE[4:]]
    assert gathers(nn.embedding_lookup, parts, ids) == [
        ((2, 2), (1, 2)), ((2, 2), (1, 2)), ((1, 2), (1, 2)),
    ]  # fmt: skip
    assert len(gathers(nn.embedding_lookup_sparse, TABLE, ids)) == 1


@pytest.mark.parametrize("parts", [1, 3])
def test_rows_that_are_not_there_are_nan_in_a_compiled_step(parts):
    params = np.array_split(TABLE, parts)
    found = jax.jit(nn.embedding_lookup)(params, jnp.array([-1, 4, 5]))
    assert np.isnan(found[jnp.array([0, 2])]).all()
    assert found[1].tolist() == [9, 10]
    whole = jax.jit(nn.embedding_lookup)([p.astype(np.int32) for p in params], jnp.array([7]))
    assert whole.tolist() == [[np.iinfo(np.int32).min] * 2]


@pytest.mark.parametrize("ids", [[5], [-1], np.array([[0, 2**40]])])
def test_rows_that_are_not_there_are_refused_outside(ids):
    with pytest.raises(ValueError, match=r"ids from 0 to 4, the rows of the table. Got"):
        nn.embedding_lookup(TABLE, ids)


@pytest.mark.parametrize("lookup", [nn.embedding_lookup, nn.embedding_lookup_sparse])
@pytest.mark.parametrize("ids", [[[1.0]], [[True]], np.zeros((2, 0))], ids=str)
def test_ids_are_integers(lookup, ids):
    with pytest.raises(TypeError, match="Expected ids of an integer dtype. Got"):
        lookup(TABLE, ids)
    with pytest.raises(TypeError, match="Expected ids of an integer dtype. Got"):
        jax.jit(lookup)(TABLE, jnp.asarray(ids))


def test_shards_are_of_one_table():
    for params, got in (
        ([TABLE, TABLE[:, :1]], r"float32 of shape \(2,\), float32 of shape \(1,\)"),
        ([TABLE, TABLE.astype(np.int32)], r"float32 of shape \(2,\), int32 of shape \(2,\)"),
        ([], "no shard"),
    ):
        with pytest.raises(ValueError, match=f"shards of one table.* Got {got}"):
            nn.embedding_lookup(params, [0])


def test_a_table_outside_of_programs_is_refused_inside():
    with pytest.raises(TypeError, match=r"a table that a compiled step can read. Got .* Keras"):
        jax.jit(lambda ids: nn.embedding_lookup(Rows(), ids))(jnp.array([0]))


IDS = [[0, 3, -1], [4, -1, -1], [-1, -1, -1], [2, 2, 1]]
WEIGHTS = np.array([[1, 2, 9], [0.5, 9, 9], [9, 9, 9], [1, 1, 3]], np.float32)
FLAT = np.array([i for row in IDS for i in row if i >= 0])
FLAT_WEIGHTS = WEIGHTS[np.array(IDS) >= 0]
COUNTS = [2, 1, 0, 3]
FORMS = {
    "dense": (IDS, WEIGHTS, {}),
    "splits": (FLAT, FLAT_WEIGHTS, {"row_splits": [0, 2, 3, 3, 6]}),
    "row ids": (FLAT, FLAT_WEIGHTS, {"row_ids": np.repeat(np.arange(4), COUNTS)}),
    "num rows": (FLAT, FLAT_WEIGHTS, {"row_ids": [0, 0, 1, 3, 3, 3], "num_rows": 4}),
    "unordered": (FLAT[::-1], FLAT_WEIGHTS[::-1], {"row_ids": [3, 3, 3, 1, 0, 0], "num_rows": 4}),
}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())


def reference(combiner, weighted, table=TABLE):
    out = np.zeros((4, 2))
    for i, (ids, weights) in enumerate(zip(IDS, WEIGHTS, strict=True)):
        w = np.array([w for j, w in zip(ids, weights, strict=True) if j >= 0])
        w = w if weighted else np.ones_like(w)
        if not len(w):
            continue
        out[i] = w @ table[[j for j in ids if j >= 0]]
        out[i] /= {"sum": 1, "mean": w.sum(), "sqrtn": np.sqrt((w**2).sum())}[combiner]
    return out


@forms
@pytest.mark.parametrize("combiner", ["mean", "sum", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
def test_pooling(form, combiner, weighted):
    ids, weights, rest = form
    weights = weights if weighted else None
    found = nn.embedding_lookup_sparse(TABLE, ids, weights, combiner, **rest)
    assert np.allclose(found, reference(combiner, weighted))


@forms
def test_compiled_pooling(form):
    ids, weights, rest = form
    arrays = {k: jnp.asarray(v) for k, v in rest.items() if k != "num_rows"}
    static = {"num_rows": 4} if "row_ids" in rest else {}
    compiled = jax.jit(
        lambda ids, weights, rest: nn.embedding_lookup_sparse(
            TABLE, ids, weights, "sqrtn", **rest, **static
        )
    )
    assert np.allclose(compiled(jnp.asarray(ids), weights, arrays), reference("sqrtn", True))


@tables
def test_pooling_of_any_table(table):
    assert np.allclose(nn.embedding_lookup_sparse(table(), IDS), reference("mean", False))


def test_pooling_scales_rows_down_first():
    clipped = TABLE * np.minimum(1, 5 / np.linalg.norm(TABLE, axis=1, keepdims=True))
    found = nn.embedding_lookup_sparse(TABLE, IDS, WEIGHTS, "sum", max_norm=5.0)
    assert np.allclose(found, reference("sum", True, clipped))


def test_padding_reads_no_other_row():
    table = Rows()
    nn.embedding_lookup_sparse(table, [[3, -1], [1, -1]])
    assert sorted(table.reads) == [(1, 2), (3, 4)]
    views = table.variables
    table.reads.clear()
    nn.embedding_lookup(views, [1, 3])
    assert sorted(set(table.reads)) == [(1, 2), (3, 4), (4, 5)]  # one of a shard without any


def test_padding_does_not_touch_the_row_that_stands_for_it():
    table = TABLE.copy()
    table[0] = np.inf
    assert nn.embedding_lookup_sparse(table, [[1, -1]], combiner="sum").tolist() == [[3, 4]]


def test_pooling_keeps_small_floats_and_widens_integers():
    found = nn.embedding_lookup_sparse(jnp.ones((2, 1), jnp.bfloat16), np.zeros((1, 999), int))
    assert (found.dtype, found.tolist()) == (jnp.bfloat16, [[1.0]])
    found = nn.embedding_lookup_sparse(np.array([[1], [2]]), [[0, 1]])
    assert (found.dtype, found.tolist()) == (jnp.float32, [[1.5]])


@pytest.mark.parametrize(
    ("args", "what"),
    [
        ({"ids": [[0]], "combiner": "max"}, "combiner 'mean', 'sum' or 'sqrtn'. Got 'max'"),
        ({"ids": [[0]], "weights": [1.0]}, r"weights in the shape of ids, \(1, 1\). Got \(1,\)"),
        ({"ids": [0]}, r"Got ids of shape \(1,\), row_splits None, row_ids None, num_rows None"),
        ({"ids": [[0]], "num_rows": 1}, "Use one form"),
        ({"ids": [0], "row_ids": [0], "row_splits": [0, 1]}, "Use one form"),
        ({"ids": [[0]], "row_splits": [0, 1]}, r"row_splits of shape \(2,\)"),
        ({"ids": [0], "row_splits": []}, r"row_splits of shape \[batch \+ 1\]. Got \(0,\)"),
        ({"ids": [0], "row_splits": [0, 2]}, r"go up from 0 to 1, the number of ids. Got \[0, 2\]"),
        ({"ids": [0], "row_ids": [0, 1]}, r"row_ids for each of 1 ids. Got shape \(2,\)"),
    ],
)
def test_pooling_is_checked(args, what):
    with pytest.raises(ValueError, match=what):
        nn.embedding_lookup_sparse(TABLE, **args)


def test_the_number_of_examples_must_be_known_to_compile():
    with pytest.raises(ValueError, match="Expected num_rows in a compiled step"):
        jax.jit(lambda r: nn.embedding_lookup_sparse(TABLE, [0], row_ids=r))(jnp.array([0]))


def test_gradients_reach_the_rows_of_variables_and_shards():
    strategy = stratagem.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        whole, parts = keras.Variable(TABLE), shards()
        ids = np.array([[0, 3, -1], [3, 4, 4]])

    def step(ids):
        with stratagem.GradientTape() as tape:
            a = nn.embedding_lookup(whole, ids[:, :2]).sum()
            b = nn.embedding_lookup_sparse(parts, ids, combiner="sum").sum()
        return tape.gradient(a + b, [whole, *parts])

    one, *several = strategy.run(step, (ids,))
    assert one.values[0].tolist() == [[1, 1], [0, 0], [0, 0], [2, 2], [1, 1]]
    joined = np.concatenate([part.values[1] for part in several])
    assert joined.tolist() == [[1, 1], [0, 0], [0, 0], [2, 2], [2, 2]]


@pytest.mark.parametrize("lookup", [nn.embedding_lookup, nn.embedding_lookup_sparse])
def test_no_ids_are_looked_up_and_have_a_gradient_of_zeros(lookup):
    table = keras.Variable(TABLE)

    @stratagem.function
    def step(ids):
        with stratagem.GradientTape() as tape:
            rows = lookup(table, ids)
            loss = jnp.sum(rows)
        return rows, tape.gradient(loss, table)

    rows, grad = step(np.zeros((0, 3), np.int32))
    assert rows.shape == ((0, 3, 2) if lookup is nn.embedding_lookup else (0, 2))
    assert grad.shape == (5, 2)
    assert not grad.any()


def test_a_layer_that_pools_trains():
    class Bag(keras.layers.Layer):
        def build(self, shape):
            self.table = self.add_weight(shape=(5, 2), initializer="ones")
            self.parts = [self.add_weight(shape=(n, 2), initializer="ones") for n in (3, 2)]

        def call(self, ids):
            pooled = nn.embedding_lookup_sparse(self.table, ids, combiner="sqrtn", max_norm=1.0)
            return pooled + nn.embedding_lookup(self.parts, jnp.maximum(ids[:, 0], 0))

    with stratagem.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = keras.Sequential([keras.Input((3,), dtype="int32"), Bag(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.array(IDS), np.ones((4, 1)), batch_size=4, epochs=1, verbose=0)
    table, first, last = (np.asarray(w) for w in model.weights[:3])
    assert (table != 1).any(axis=1).tolist() == [True, True, True, True, True]
    assert (first != 1).any(axis=1).tolist() == [True, False, True]
    assert (last != 1).any(axis=1).tolist() == [False, True]


def look_up(ids, whole, parts):
    padded = jnp.where(ids > 8, -1, ids)
    one = nn.embedding_lookup_sparse(whole, padded, combiner="sqrtn", max_norm=0.01)
    example = jnp.repeat(jnp.arange(8), 3)
    flat = nn.embedding_lookup_sparse(whole, ids.reshape(-1), row_ids=example, num_rows=8)
    return one + flat + nn.embedding_lookup(parts, ids).sum(1)


def test_tables_on_parameter_servers_are_pulled_by_row():
    class Bag(keras.layers.Layer):
        def build(self, shape):
            self.whole = self.add_weight(shape=(11, 2), name="table")
            self.parts = [self.add_weight(shape=(n, 2), name=f"part{n}") for n in (6, 5)]

        def call(self, ids):
            return look_up(ids, self.whole, self.parts)

    random = np.random.default_rng(0)
    batches = [
        (random.integers(0, 11, (8, 3)).astype("int32"), random.normal(size=(8, 2)).astype("f4"))
        for _ in range(3)
    ]
    model = keras.Sequential([keras.Input((3,), dtype="int32", batch_size=8), Bag()])
    optimizer = keras.optimizers.Adagrad(0.1)
    optimizer.build(model.trainable_variables)
    job = Job(train_step((model, optimizer)), *batches[0], sharded=("table",))
    assert [job.variables[vid].name for vid in job.parts.whole] == ["learning_rate"]
    compare(job, batches)
