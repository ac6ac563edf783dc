"""Tables whose rows a worker looks up and adds up itself, beside its compiled program."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
from jax import export
from keras import layers

from devices import served
from devices.served import Job, compare, train_step
from devices.test_apart_tables import BATCHES, MODELS, ROWS, WIDTH, model_of
from stratagem.step import by_lookup
from stratagem.step.apart import divide
from stratagem.step.runner import taken

opt = keras.optimizers
IDS, Y = BATCHES[0]


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch):
    monkeypatch.setattr(by_lookup, "_LEAST", 0)


def inputs_of(job):
    """Shapes of what a worker's program takes, and returns."""
    program = export.deserialize(bytearray(job.parts.compute))
    return [a.shape for a in program.in_avals], [a.shape for a in program.out_avals]


def job_of(make, rule, name):
    return Job(train_step((model_of(make, name), rule)), IDS, Y)


@pytest.mark.parametrize(
    "name", ["one", "shared", "masked", "take", "ops", "index", "single", "clip", "negative"]
)
def test_a_program_of_lookups_alone_has_one_shape(name):
    make, rule = MODELS[name]
    job = job_of(make, rule() if name != "take" else opt.Adagrad(0.1), f"by_{name}")
    (table,) = job.parts.tables
    assert table.by_lookup
    shapes, _ = inputs_of(job)
    assert all(isinstance(n, int) for shape in shapes for n in shape)
    compare(job, BATCHES, rtol=2e-5)


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (MODELS["scaled"][0], lambda: opt.SGD(0.1)),  # the table changes before it is looked up
        (MODELS["one"][0], lambda: opt.SGD(0.1, clipnorm=0.05)),  # a norm of all rows
        (lambda ids: layers.Embedding(ROWS, WIDTH, dtype="mixed_bfloat16")(ids), opt.SGD),
    ],
)
def test_what_needs_the_rows_gets_them(make, rule):
    job = job_of(make, rule(), "rows")
    (table,) = job.parts.tables
    assert not table.by_lookup
    assert not job.parts.sums
    shapes, _ = inputs_of(job)
    assert any(not isinstance(n, int) for shape in shapes for n in shape)


def test_the_gradient_of_a_sum_is_handed_once_for_all_that_it_adds():
    def summed(ids):
        return layers.Reshape((1, WIDTH))(layers.Lambda(lambda x: x.sum(1))(MODELS["one"][0](ids)))

    job = job_of(summed, opt.SGD(0.1), "summed")
    ((number, lookup),) = job.parts.sums[0].terms
    assert lookup == 0
    _, shapes = inputs_of(job)
    assert shapes[job.parts.results + job.parts.local + number] == (len(IDS), WIDTH)
    compare(job, BATCHES)


def summed(make, axis=1):
    """A sum over looked-up rows, beside nothing else of them."""

    def model(ids):
        return layers.Reshape((1, -1))(layers.Lambda(lambda x: keras.ops.sum(x, axis))(make(ids)))

    return model


def shared(ids):
    table = layers.Embedding(ROWS, WIDTH)
    pool = layers.GlobalAveragePooling1D()
    both = layers.Concatenate()([pool(table(ids)), pool(table((ids[:, :2] + 1) % ROWS))])
    return layers.Reshape((1, -1))(both)


BAGS = {
    "sum": (summed(MODELS["one"][0]), opt.SGD, (1,)),
    "mean of two lookups": (shared, opt.Adagrad, (1, 1)),
    "of rows by element": (summed(MODELS["take"][0]), opt.SGD, (1,)),
    "over pairs": (
        summed(lambda ids: MODELS["one"][0](layers.Reshape((2, 2))(ids)), (1, 2)), opt.SGD, (2,)
    ),
    "of pairs": (
        summed(lambda ids: MODELS["one"][0](layers.Reshape((2, 2))(ids)), 2), opt.SGD, (1,)
    ),
}  # fmt: skip


@pytest.mark.parametrize("servers", [0, 1, 100])
@pytest.mark.parametrize("name", BAGS)
def test_sums_of_bags_travel_where_they_are_fewer(name, servers):
    make, rule, bags = BAGS[name]
    step = train_step((model_of(make, "bags"), rule(0.1)))
    job = Job(step, IDS, Y, servers=servers)
    (table,) = job.parts.tables
    assert table.by_lookup
    assert table.bags == bags
    results, items = job.start(IDS, Y)
    assert results
    (handed,) = [i["handed"] for i in items if i["rows"] is not None]
    assert [kind for kind, _ in handed].count("bags") == (servers == 1)
    compare(job, BATCHES, rtol=2e-5)


@pytest.mark.parametrize(
    "make",
    [
        MODELS["one"][0],
        summed(MODELS["one"][0], 2),  # over a row
        lambda ids: layers.Lambda(lambda x: keras.ops.ones((8, 1, 1)) * keras.ops.sum(x, 0))(
            MODELS["one"][0](ids)  # over the batch
        ),
        lambda ids: summed(lambda _: (x := MODELS["one"][0](ids)) * keras.ops.max(x))(ids),
        lambda ids: layers.Concatenate(1)(
            [(table := layers.Embedding(ROWS, WIDTH))(ids), summed(lambda i: table(i + 0))(ids)]
        ),
    ],
)
def test_where_rows_are_needed_themselves_they_travel(make):
    job = Job(train_step((model_of(make, "no_bags"), opt.SGD(0.1))), IDS, Y, servers=1)
    assert [table.bags for table in job.parts.tables] == [()]
    compare(job, BATCHES, rtol=2e-5)


def test_small_lookups_stay_in_the_program(monkeypatch):
    size = IDS.size * WIDTH
    for least, beside in ((size, True), (size + 1, False)):
        monkeypatch.setattr(by_lookup, "_LEAST", least)
        (table,) = job_of(MODELS["one"][0], opt.SGD(0.1), f"least_{least}").parts.tables
        assert table.by_lookup == beside


def test_both_ways_compute_the_same(monkeypatch):
    jobs = []
    for beside in (True, False):
        monkeypatch.setattr(served, "divide", functools.partial(divide, by_lookup=beside))
        keras.utils.set_random_seed(1)
        jobs.append(job_of(MODELS["shared"][0], opt.SGD(0.1), "both"))
    assert [job.parts.tables[0].by_lookup for job in jobs] == [True, False]
    for ids, y in BATCHES:
        for job in jobs:
            job(ids, y)
    for a, b in zip(*(job.state.values() for job in jobs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 4), (2, 0)])
@pytest.mark.parametrize("row", [(), (5,), (2, 3)])
def test_looked_up_rows_lie_where_xla_reads_them(shape, row):
    rows = np.random.default_rng(0).normal(size=(6, *row)).astype("float32")
    where = np.random.default_rng(1).integers(0, 6, shape).astype("int32")
    found = taken(rows, where)
    np.testing.assert_array_equal(found, rows[where])
    assert not found.size or found.ctypes.data % 64 == 0


def test_no_rows_at_all():
    empty = np.zeros((0, 4), "int32")
    assert taken(np.zeros((0, 3), "float32"), empty).shape == (0, 4, 3)


def test_what_all_workers_have_is_applied_where_the_rows_are():
    def steps(rule, name):
        job = job_of(MODELS["one"][0], rule, name)
        (push,) = [p for p in job.parts.pushes if p.table is not None]
        (program,) = [u.program for u in job.parts.units if u.uid == push.uid]
        return [step[0] for step in program["steps"]], [kind for kind, _ in push.handed]

    assert steps(opt.SGD(0.1), "rate") == (["mul", "sub"], ["scalar", "sum"])
    names, kinds = steps(opt.SGD(0.1, clipvalue=0.01), "clipped")
    assert names[-2:] == ["mul", "sub"]
    assert {"max", "min"} & set(names) or "clamp" in names
    assert kinds == ["scalar", "sum"]

    # Where the gradient is that of the whole, only what is not the same before a mean as after it.
    def dense(rule, name):
        kernel = keras.Sequential([keras.Input((2,)), layers.Dense(3)], name=name)
        job = Job(train_step((kernel, rule)), Y, np.zeros((len(Y), 3), "float32"))
        return [step[0] for u in job.parts.units for step in u.program["steps"] if step[0] != "add"]

    assert dense(opt.SGD(0.1), "dense") == ["sub", "sub"]
    assert dense(opt.SGD(0.1, clipvalue=0.01), "dense_clipped") == ["max", "min", "mul", "sub"] * 2
    # A factor of this worker's own data stays with it: another one has another.
    names, kinds = steps(opt.SGD(0.1, global_clipnorm=0.05), "by norm")
    assert kinds.count("rows") == 1
    assert names.count("mul") <= 1
