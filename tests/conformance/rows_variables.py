"""Rows 24 to 31, 42 and 44: what the replicas' writes to one variable become."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

from conformance.table import (
    COMPONENTS,
    SEVERAL,
    Each,
    Row,
    components,
    each,
    parts,
    rank,
    variable,
)
from stratagem.errors import ReplicaDependentWriteError

LAW_2 = (
    "law 2: a write that differs between replicas and is not aggregated is an error; TF lets the "
    "copies diverge silently"
)
PYTHON_NUMBERS = "a Python number counts once a replica, like a tensor of that value; TF refuses it"


def total(n: int) -> float:
    """1 + 2 + ... + n: the sum of what the replicas write."""
    return n * (n + 1) / 2


def written(aggregation: str, method: str, synchronization: str = "auto") -> Any:
    """Every replica calls `method(rank)` on a variable that starts at 10."""

    def call(strategy: Any) -> Any:
        var = variable(strategy, aggregation, synchronization)

        def step() -> None:
            getattr(var, method)(rank())

        strategy.run(step)
        return var

    return call


def python_number(aggregation: str) -> Any:
    def call(strategy: Any) -> Any:
        var = variable(strategy, aggregation)
        strategy.run(lambda: var.assign_add(1.0))
        return var

    return call


def on_read(aggregation: str) -> Any:
    """Row 27 in full: the value at first, after the replicas' writes, and after an assign."""

    def call(strategy: Any) -> Any:
        var = variable(strategy, aggregation, "on_read")
        seen = [var.numpy()]
        strategy.run(lambda: var.assign_add(rank()))
        seen.append(var.numpy())
        var.assign(6.0)
        return [*seen, components(strategy, var)]

    return call


def add_outside(strategy: Any) -> None:
    variable(strategy, "sum", "on_read").assign_add(1.0)


class Total(keras.Layer):
    """A layer whose weight is summed on read."""

    def build(self, _: Any) -> None:
        self.total = keras.Variable(
            0.0, trainable=False, aggregation="sum", synchronization="on_read", name="total"
        )

    def call(self, x: Any) -> Any:
        return x


def saved_and_restored(strategy: Any) -> Any:
    with strategy.scope(), tempfile.TemporaryDirectory() as folder:
        model = keras.Sequential([keras.Input((1,)), Total()])
        var = model.layers[0].total
        strategy.run(lambda: var.assign(rank()))
        saved = var.numpy()
        model.save_weights(Path(folder) / "total.weights.h5")
        var.assign(0.0)
        model.load_weights(Path(folder) / "total.weights.h5")
        return [saved, components(strategy, var)]


def updated(strategy: Any) -> Any:
    var = variable(strategy, "none", value=1.0)
    result = strategy.extended.update(
        var, lambda v, x: v.assign_add(x), args=(parts(strategy, [1, 1, 1]),)
    )
    return [result, components(strategy, var)]


def momentum_step(strategy: Any) -> Any:
    with strategy.scope():
        var = keras.Variable(np.array([1, 2, 3, 4], np.float32))
        optimizer = keras.optimizers.SGD(0.5, momentum=0.06)

    def step() -> None:
        optimizer.apply_gradients([(np.array([1, 6, 7, 2], np.float32), var)])

    strategy.run(step)
    return [var, optimizer.iterations]


def central(aggregation: str, synchronization: str) -> Row:
    """Row 42: `assign_add(rank)` onto 10, one value whichever way it synchronises."""
    seen = {"none": "ValueError", "sum": 13.0, "mean": 11.5, "only_first_replica": 11.0}
    refused = aggregation == "none"
    return Row(
        42,
        f"central, {aggregation}, {synchronization}",
        written(aggregation, "assign_add", synchronization),
        ReplicaDependentWriteError if refused else lambda _: seen[aggregation],
        seen[aggregation],
        on=("central",),
        match=r"same on all replicas.*\n.*aggregation 'none'" if refused else "",
    )


def writes(method: str, number: int, base: float) -> list[Row]:
    """Rows 24 and 25: one for each aggregation."""
    rows = [
        Row(
            number,
            f"{method}, none",
            written("none", method),
            ReplicaDependentWriteError,
            "{1|2}" if method == "assign" else "{11|12}",
            differs=LAW_2,
            on=SEVERAL,
            match=r"same on all replicas.*\n.*aggregation 'none'(.|\n)*'only_first_replica'",
        ),
        Row(
            number,
            f"{method}, none, one replica",
            written("none", method),
            lambda n: base + 1.0,
            differs="one replica has nothing to disagree with",
            on=("default", "one"),
        ),
    ]
    for how, value, seen in (
        ("sum", total, base + 3.0),
        ("mean", lambda n: total(n) / n, base + 1.5),
        ("only_first_replica", lambda n: 1.0, base + 1.0),
    ):
        expected = lambda n, value=value: base + value(n)  # noqa: E731
        rows.append(Row(number, f"{method}, {how}", written(how, method), expected, seen))
    return rows


ROWS = [
    *writes("assign", 24, 0.0),
    *writes("assign_add", 25, 10.0),
    Row(
        26,
        "sum of a Python number",
        python_number("sum"),
        lambda n: 10.0 + n,
        "ValueError",
        differs=PYTHON_NUMBERS,
    ),
    Row(26, "mean of a Python number", python_number("mean"), lambda n: 11.0, 11.0),
    Row(
        27,
        "on read, sum",
        on_read("sum"),
        lambda n: [10.0 * n, 10.0 * n + total(n), each(n, lambda _: 6.0 / n)],
        [20.0, 23.0, Each([3.0, 3.0])],
        on=("default", "one", *COMPONENTS),
    ),
    Row(
        28,
        "on read, mean",
        on_read("mean"),
        lambda n: [10.0, 10.0 + total(n) / n, each(n, lambda _: 6.0)],
        [10.0, 11.5, Each([6.0, 6.0])],
    ),
    Row(
        29,
        "on read, sum, written by no replica",
        add_outside,
        ValueError,
        "ValueError",
        on=COMPONENTS,
        match="assign_add or assign_sub on .* inside strategy.run.*Got it in cross-replica",
    ),
    Row(
        30,
        "save and restore",
        saved_and_restored,
        lambda n: [total(n), each(n, lambda _: total(n) / n)],
        [3.0, Each([1.5, 1.5])],
        on=("default", "one", *COMPONENTS),
    ),
    Row(31, "update", updated, lambda n: [2.0, each(n, lambda _: 2.0)], [2.0, Each([2.0, 2.0])]),
    *(
        central(how, when)
        for how in ("none", "sum", "mean", "only_first_replica")
        for when in ("auto", "on_read")
    ),
    Row(
        44,
        "SGD with momentum",
        momentum_step,
        lambda n: [[1 - 0.5 * n, 2 - 3.0 * n, 3 - 3.5 * n, 4 - 1.0 * n], 1],
        [[0.0, -4.0, -4.0, 2.0], 1],
    ),
]
