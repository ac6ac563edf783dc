"""Which updates are those of one device where their mean over parts of a batch is taken."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import ops

from devices.served import Job, train_step
from devices.test_apart import BATCHES, dense


class Rule(keras.optimizers.Optimizer):
    """Adds something that is made of a gradient."""

    def __init__(self, change, name):
        super().__init__(0.1, name=name)
        self.change = change

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, learning_rate * self.change(gradient))


def finite(g):
    """Zeros instead of what is not finite, as with a loss scale."""
    return ops.where(ops.all(ops.isfinite(g)), g, ops.zeros_like(g))


LINEAR = {
    "as it is": lambda g: g,
    "centred": lambda g: g - ops.mean(g, axis=0, keepdims=True),
    "scaled": lambda g: g / 3.0 + 2.0 * g,
    "turned": lambda g: ops.transpose(ops.concatenate([g[1:], g[:1]]))[::-1].T,
    "by a matrix": lambda g: ops.matmul(g, ops.ones((2, 2))),
    "where finite": finite,
    "by place": lambda g: ops.where(ops.arange(2) > 0, g, 0.0),
    "element by element": lambda g: ops.sign(g) * ops.sqrt(ops.abs(g)),  # servers do it
}  # fmt: skip
NOT_LINEAR = {
    "by its norm": (lambda g: g / ops.norm(g), "mul"),
    "a product": (lambda g: ops.matmul(g, ops.matmul(ops.transpose(g), g)), "dot_general"),
    "the largest": (lambda g: g * 0.0 + ops.max(g), "reduce_max"),
    "where above the mean": (lambda g: ops.where(g > ops.mean(g), g, 0.0), "gt"),
    "through what is not": (lambda g: 2.0 * ops.sum(ops.square(g)) + g, "square"),
    "over it": (lambda g: ops.ones((3, 2)) / ops.sum(g), "div"),
}


def by_part(change, name):
    rule = Rule(change, name)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, use_bias=False)])
    return Job(train_step((model, rule)), *BATCHES[0]).parts.by_part


@pytest.mark.parametrize("name", LINEAR)
def test_a_mean_is_the_same_before_and_after(name):
    assert by_part(LINEAR[name], "linear") == []


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_another_mean(name):
    change, operation = NOT_LINEAR[name]
    ((uid, path, found),) = by_part(change, "other")
    assert found == operation
    assert path.endswith("/kernel")
    assert uid


def test_whole_updates_begin_with_the_gradient():
    """Lamb's squares and norms are the servers' to compute, of the mean in a round."""
    job = Job(train_step((dense(name="lamb2"), keras.optimizers.Lamb(0.1))), *BATCHES[0])
    assert job.parts.by_part == []
    whole = [u for u in job.parts.units if u.program["kind"] == "whole"]
    handed = [push.handed for push in job.parts.pushes if push.uid in {u.uid for u in whole}]
    shapes = []
    results, items = job.start(*BATCHES[0])
    for item in items:
        if item["uid"] in {u.uid for u in whole}:
            shapes.append(sorted(np.shape(value) for _, value in item["handed"]))
    assert len(handed) == len(shapes) == 2
    assert all(len([s for s in one if s]) == 1 for one in shapes)  # one array each
