"""Steps for parameter servers: what the parts compute together is what the whole step computes."""

from __future__ import annotations

import jax
import keras
import numpy as np
import pytest
from keras import layers

from devices.served import Job, compare, train_step
from stratagem.step import primitives
from stratagem.step.parts import Parts

opt = keras.optimizers
random = np.random.default_rng(0)


def batches(count=3, rows=8):
    return [
        (
            random.normal(size=(rows, 3)).astype("float32"),
            random.normal(size=(rows, 2)).astype("float32"),
        )
        for _ in range(count)
    ]


BATCHES = batches()


def dense(**layer):
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((3,)), layers.Dense(2, "tanh", **layer)])


OPTIMIZERS = {
    "sgd": lambda: opt.SGD(0.1),
    "nesterov": lambda: opt.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda: opt.Adam(0.1),
    "amsgrad": lambda: opt.Adam(0.1, amsgrad=True, clipvalue=0.05),
    "adamw": lambda: opt.AdamW(0.1, weight_decay=0.1, clipnorm=0.05),
    "adamax": lambda: opt.Adamax(0.1),
    "adadelta": lambda: opt.Adadelta(0.1),
    "adagrad": lambda: opt.Adagrad(0.1, global_clipnorm=0.05),
    "rmsprop": lambda: opt.RMSprop(0.1, centered=True, momentum=0.5),
    "nadam": lambda: opt.Nadam(0.1),
    "ftrl": lambda: opt.Ftrl(0.1, l1_regularization_strength=0.01, l2_regularization_strength=0.1),
    "lion": lambda: opt.Lion(0.1),
    "ema": lambda: opt.Adam(0.1, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=2),
    "loss scale": lambda: opt.LossScaleOptimizer(
        opt.Adam(0.1), initial_scale=4.0, dynamic_growth_steps=2
    ),
    "accumulation": lambda: opt.Adam(0.1, gradient_accumulation_steps=2, loss_scale_factor=8.0),
    "cosine": lambda: opt.SGD(
        opt.schedules.CosineDecay(0.1, 10, warmup_target=0.2, warmup_steps=2)
    ),
    "steps": lambda: opt.SGD(opt.schedules.PiecewiseConstantDecay([1, 2], [0.1, 0.2, 0.3])),
}
"""What changes weights element by element: servers need neither JAX nor all rows for it."""


def job_of(model, optimizer, **how):
    return Job(train_step((model, optimizer)), *BATCHES[0], **how)


def test_optimizers_by_element_on_sharded_weights():
    # One program for all: it is traced and compiled once.
    models = [dense(name=name.replace(" ", "_")) for name in OPTIMIZERS]
    optimizers = [make() for make in OPTIMIZERS.values()]
    step = train_step(*zip(models, optimizers, strict=True))
    job = Job(step, *BATCHES[0], sharded=("kernel",))
    assert {u.program["kind"] for u in job.parts.units} == {"rows"}
    compare(job, BATCHES)


def test_updates_over_whole_weights():
    models = [
        dense(name="lamb"),
        dense(name="adafactor"),
        dense(name="unit", kernel_constraint="unit_norm"),
    ]
    optimizers = [opt.Lamb(0.1), opt.Adafactor(0.1), opt.Adam(0.1)]
    step = train_step(*zip(models, optimizers, strict=True))
    job = Job(step, *BATCHES[0])
    kinds = {job.variables[u.vids[0]].path: u.program["kind"] for u in job.parts.units}
    whole = {path for path, kind in kinds.items() if kind == "whole"}
    assert {path.rpartition("/")[0].rpartition("/")[2] for path in whole} == {
        "lamb",
        "adafactor",
        "unit",
    }
    compare(job, BATCHES)
    with pytest.raises(ValueError, match=r"update of '.*lamb/kernel' that changes each element by"):
        job_of(dense(name="lamb"), opt.Lamb(0.1), sharded=("kernel",))


def test_adam_is_one_unit_a_weight_and_is_sent_one_gradient():
    job = job_of(dense(), opt.Adam(0.1))
    names = [
        [job.variables[vid].name.rpartition("_")[2] for vid in u.vids] for u in job.parts.units
    ]
    slots = ["momentum", "velocity"]
    assert names == [["kernel", *slots], ["bias", *slots], ["iteration"]]
    handed = [list(u.program["handed"]) for u in job.parts.units]
    assert handed == [["rows", "scalar"], ["rows", "scalar"], []]
    pulled = [job.variables[vid].name for vid in job.parts.whole]
    assert pulled == ["kernel", "bias", "learning_rate", "iteration"]  # no slots
    compare(job, BATCHES)


def test_closures_that_pulled_the_same_add_up():
    job = job_of(dense(), opt.SGD(0.1))
    kernel = next(n for n, v in job.variables.items() if v.name == "kernel")
    before = job.state[kernel].copy()
    first, second = job.start(*BATCHES[0]), job.start(*BATCHES[1])
    job.finish(first)
    one = job.state[kernel] - before
    job.finish(second)
    both = job.state[kernel] - before
    job.state[kernel] = before.copy()
    job.finish(second)
    np.testing.assert_allclose(both, one + job.state[kernel] - before, rtol=1e-4, atol=1e-7)
    counter = next(n for n, v in job.variables.items() if v.name == "iteration")
    assert job.state[counter] == 3


def test_assignments():
    v, w, count = (keras.Variable(np.ones(shape, "float32")) for shape in (3, 3, ()))

    def step(x):
        count.assign_add(1)
        v.assign_sub(x * count)  # what is added, the worker computes: from what it pulled
        w.assign(w * 2 + x)
        return v + w

    x = np.asarray([1.0, 2.0, 3.0], "float32")
    job = Job(step, x)
    compare(job, [(x,), (x,)])
    started = [job.start(x) for _ in range(5)]
    for closure in started:
        job.finish(closure)
    assert job.value(count) == 1 + 2 + 5
    w_before = 4 * 1 + 3 * x
    for _ in range(5):
        w_before = w_before * 2 + x
    np.testing.assert_allclose(job.value(w), w_before)
    # All five pulled a count of 3.
    np.testing.assert_allclose(job.value(v), 1 - x * (2 + 3) - 5 * 4 * x)


def test_statistics_of_batches_and_variables_of_the_caller():
    model = keras.Sequential([
        keras.Input((3,)), layers.Dense(3), layers.BatchNormalization(), layers.Dense(2),
    ])  # fmt: skip
    metric = keras.metrics.MeanAbsoluteError()
    train = train_step((model, opt.SGD(0.1)))

    def step(x, y):
        loss = train(x, y)
        metric.update_state(y, model(x))
        return loss

    job = Job(step, *BATCHES[0], local=metric.variables)
    names = {v.name for v in metric.variables}
    assert job.parts.local == 2
    assert not names & {job.variables[vid].name for vid in job.parts.whole}
    assert not names & {job.variables[vid].name for u in job.parts.units for vid in u.vids}
    for number in [n for n, v in job.variables.items() if v.name in names]:
        variable = job.variables[number]
        position = [v is variable for v in metric.variables].index(True)
        job.state[number] = job.local[position]
    for batch in BATCHES:
        np.testing.assert_allclose(job(*batch), job.undivided(*batch), rtol=1e-5)
    for number, variable in job.variables.items():
        if variable.name not in names:
            np.testing.assert_allclose(job.state[number], job.plain[number], rtol=1e-4, atol=1e-6)
    plain = [job.plain[job.numbers[id(v)]] for v in metric.variables]
    np.testing.assert_allclose(job.local, plain, rtol=1e-5)


def test_closures_draw_different_numbers():
    generator = keras.random.SeedGenerator(3)

    def step(x):
        return keras.random.uniform((4,), seed=generator) + x

    x = np.float32(0)
    job = Job(step, x)
    assert [g.kind for g in job.parts.given] == ["closure"]
    first, second = job.start(x), job.start(x)  # both pulled the same seed
    a, b = job.finish(first), job.finish(second)
    assert not np.allclose(a, b)
    np.testing.assert_array_equal(a, job.undivided(x))  # closure 0 draws what one device draws
    assert job.value(generator.state).tolist() == [3, 2]


def test_results_that_are_no_arrays_stay():
    job = Job(lambda x: {"text": "same", "x": x + 1, "none": None}, np.float32(1))
    result = job(np.float32(1))
    assert (result["text"], result["x"], result["none"]) == ("same", 2, None)


def test_given_values():
    def step(x):
        element = primitives.given("element", ("iterator", 0), (2,), "float32")
        again = primitives.given("element", ("iterator", 0), (2,), "float32")
        return x + element * again * primitives.given("worker", None, (), "int32")

    job = Job(step, np.float32(1))
    assert [(g.kind, g.key) for g in job.sent.given] == [
        ("element", ("iterator", 0)),
        ("worker", None),
    ]
    results, _, _ = job.runner.compute(
        [], [], [], [np.float32(1)], [np.asarray([1, 2], "float32"), np.int32(3)]
    )
    np.testing.assert_array_equal(results[0], [4, 13])


def test_given_values_in_a_loop_are_refused():
    def step(x):
        def body(i, total):
            return total + primitives.given("element", 0, (), "float32")

        return jax.lax.fori_loop(0, 3, body, x)

    with pytest.raises(ValueError, match="Expected next.iterator. and other values of a worker at"):
        Job(step, np.float32(1))


def test_calls_back_into_python_are_refused():
    def step(x):
        jax.debug.print("{}", x)
        return x

    with pytest.raises(ValueError, match="Expected a step that other processes can run"):
        Job(step, np.float32(1))


def test_what_is_no_step_is_refused():
    with pytest.raises(ValueError, match="Expected a step in parts. Got"):
        Parts.from_wire({"whole": 3}, [b"", b""])
