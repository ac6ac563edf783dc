"""Tables of which a worker pulls the rows that a batch looks up, and pushes gradients of those."""

from __future__ import annotations

import logging

import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers

from devices.served import Job, compare, train_step
from stratagem.step.runner import bucket

opt = keras.optimizers
random = np.random.default_rng(0)
ROWS, WIDTH = 50, 3
BATCHES = [
    (random.integers(0, ROWS, (8, 4)).astype("int32"), random.normal(size=(8, 2)).astype("float32"))
    for _ in range(3)
]


class Lookup(layers.Layer):
    """A table that a function of it and ids looks up."""

    def __init__(self, how, **kwargs):
        super().__init__(**kwargs)
        self.how = how

    def build(self, shape):
        del shape
        self.table = self.add_weight(shape=(ROWS, WIDTH), name="table")

    def call(self, ids):
        return self.how(self.table, ids)


def single(table, ids):
    """Rows by one number each, one of them twice, one counted from the end."""
    t = table.value
    row = t[ids[0, 0]] * t[ids[1, 2]] + t[ids[0, 0]] + t[ids[2, 1] - ROWS]
    return row * ids[..., None].astype("float32") / ROWS


def model_of(make, name, **layer):
    ids = keras.Input((4,), dtype="int32")
    x = make(ids, **layer)
    return keras.Model(ids, layers.Dense(2)(layers.Flatten()(x)), name=name)


def one(ids, **layer):
    return layers.Embedding(ROWS, WIDTH, **layer)(ids)


def twice(ids):
    table = layers.Embedding(ROWS, WIDTH)
    return layers.Concatenate()([table(ids), table(ids[:, ::-1]), table((ids + 1) % ROWS)])


def two(ids):
    """Two tables of one shape, looked up by the same ids: whose rows a gradient is, is not said."""
    return layers.Multiply()([one(ids), one(ids)])


def masked(ids):
    return layers.SimpleRNN(2)(one(ids, mask_zero=True))


def custom(how):
    return lambda ids: Lookup(how)(ids)


MODELS = {
    "one": (one, lambda: opt.SGD(0.1)),
    "shared": (twice, lambda: opt.Adagrad(0.1)),
    "two": (two, lambda: opt.SGD(0.1, global_clipnorm=0.05)),
    "masked": (masked, lambda: opt.SGD(0.1, clipvalue=0.01)),
    "take": (
        custom(lambda t, ids: jnp.take(t.value, ids, axis=0)),
        lambda: opt.Adagrad(0.1, clipnorm=0.01),
    ),
    "ops": (custom(lambda t, ids: keras.ops.take(t, ids, axis=0)), lambda: opt.SGD(0.1)),
    "index": (custom(lambda t, ids: t.value[ids]), lambda: opt.SGD(0.1, loss_scale_factor=4.0)),
    "single": (custom(single), lambda: opt.Adagrad(0.1)),
    "clip": (
        custom(lambda t, ids: jnp.take(t.value, ids + 2, axis=0, mode="clip")),
        lambda: opt.SGD(0.1),
    ),
    "negative": (
        custom(lambda t, ids: jnp.take(t.value, ids - ROWS, axis=0)),
        lambda: opt.SGD(0.1),
    ),
    "scaled": (
        custom(lambda t, ids: jnp.take(2 * t.value, ids, axis=0)),
        lambda: opt.LossScaleOptimizer(opt.SGD(0.1), initial_scale=4.0, dynamic_growth_steps=2),
    ),
}


def test_lookups():
    pairs = [(model_of(make, name), rule()) for name, (make, rule) in MODELS.items()]
    # One program for all: it is traced and compiled once.
    job = Job(train_step(*pairs), *BATCHES[0], sharded=("embeddings", "table"))
    tables = {t.vid for t in job.parts.tables}
    assert tables == {
        n for n, v in job.variables.items() if v.path.endswith(("embeddings", "table"))
    }
    assert len(tables) == 1 + len(MODELS)
    assert not tables & set(job.parts.whole)
    by_row = [p for p in job.parts.pushes if p.table is not None]
    assert len(by_row) == len(tables)
    clip = [t.clip for t in job.parts.tables]
    several = [(False,) * 3] * 2 + [(True,)]
    assert sorted(clip) == [(False,)] * (len(tables) - 3) + several
    compare(job, BATCHES, rtol=2e-5)


def test_half_precision():
    job = Job(
        train_step((model_of(one, "half", dtype="mixed_bfloat16"), opt.SGD(0.1))), *BATCHES[0]
    )
    assert len(job.parts.tables) == 1
    compare(job, BATCHES, rtol=2e-2)


def test_rows_that_no_id_names_rest():
    job = Job(train_step((model_of(one, "lazy"), opt.Adam(0.1))), *BATCHES[0])
    (push,) = [p for p in job.parts.pushes if p.table is not None]
    vids = job.units[push.uid][0]
    assert len(vids) == 3
    for ids, y in BATCHES:
        before = [job.state[vid].copy() for vid in vids]
        job(ids, y)
        touched = np.isin(np.arange(ROWS), ids)
        for old, vid in zip(before, vids, strict=True):
            changed = (job.state[vid] != old).any(axis=1)
            np.testing.assert_array_equal(changed, touched)


def test_ids_that_no_row_has():
    model = model_of(one, "unknown")
    job = Job(train_step((model, opt.SGD(0.1))), *BATCHES[0])
    ids, y = BATCHES[0]
    with pytest.raises(
        ValueError, match=r"from 0 to 49 for '.*embeddings', which has 50 rows. Got 50"
    ):
        job(np.full_like(ids, 50), y)
    with pytest.raises(ValueError, match=r"Got -101 \(among 32 looked up\). Map unknown ids"):
        job(np.full_like(ids, -101), y)


def warned(caplog, make, rule, name):
    with caplog.at_level(logging.WARNING, logger="stratagem"):
        step = train_step((model_of(make, name), rule))
        Job(step, *BATCHES[0], sharded=("table",))
        job = Job(step, *BATCHES[0], sharded=("table",))
    texts = [r.getMessage() for r in caplog.records]
    caplog.clear()
    assert not job.parts.tables
    compare(job, BATCHES)
    (text,) = texts
    return text


def tied(table, ids):
    found = jnp.take(table.value, ids, axis=0)
    return found @ table.value.T


def test_a_table_that_is_also_read_whole_is_pulled_whole_with_one_warning(caplog):
    text = warned(caplog, lambda ids: Lookup(tied, name="tied")(ids), opt.SGD(0.1), "a")
    assert "'tied/table' (0.0 MB) is looked up by row, but every closure pulls all of it" in text
    assert "Use it only through lookups" in text

    def looked_up(t, i):
        return jnp.take(t.value, i, axis=0) + jnp.mean(t.value**2)

    def decayed(ids):
        return Lookup(looked_up, name="mean")(ids)

    assert "'reduce_sum' needs all of its rows" in warned(caplog, decayed, opt.SGD(0.1), "b")

    def plain(ids):
        return Lookup(lambda t, i: jnp.take(t.value, i, axis=0), name="plain")(ids)

    rule = opt.SGD(0.1, gradient_accumulation_steps=2)
    assert "accumulates gradients over steps" in warned(caplog, plain, rule, "c")


def test_gradients_that_are_returned_are_whole(caplog):
    v = keras.Variable(np.ones((ROWS, WIDTH), "float32"), name="returned")

    def step(ids):
        return jnp.take(v.value, ids, axis=0), v.value * 2

    with caplog.at_level(logging.WARNING, logger="stratagem"):
        job = Job(step, BATCHES[0][0])
    assert "the step returns it" in caplog.records[0].getMessage()
    assert job(BATCHES[0][0])[1].shape == (ROWS, WIDTH)


def test_few_shapes_are_compiled():
    assert [bucket(n) for n in (0, 8, 9, 12, 13, 17, 25)] == [8, 8, 12, 12, 16, 24, 32]
    sizes = {bucket(n) for n in range(1, 100_001)}
    assert len(sizes) == 29
    assert all(n <= bucket(n) <= max(8, 1.5 * n) for n in range(1, 10_000))
