"""Law 4: from `Strategy.run` to `jax.lax.psum` a reader passes at most 6 functions in 5 files."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import NamedTuple

import jax
import keras
import numpy as np
import pytest

import stratagem

PACKAGE = str(Path(stratagem.__file__).parent)
MAX_FUNCTIONS, MAX_FILES = 6, 5


class Hop(NamedTuple):
    """A function of this package on the stack."""

    file: str
    function: str


@pytest.fixture
def hops(monkeypatch):
    """The functions of this package that are open when `psum` is called, outermost first."""
    seen: list[tuple[threading.Thread, list[Hop]]] = []
    psum = jax.lax.psum

    def recording(*args, **kwargs):
        frame = sys._getframe(1)
        stack = []
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(PACKAGE):
                stack.append(Hop(code.co_filename[len(PACKAGE) + 1 :], code.co_qualname))
            frame = frame.f_back
        seen.append((threading.current_thread(), stack[::-1]))
        return psum(*args, **kwargs)

    monkeypatch.setattr(jax.lax, "psum", recording)
    return seen


def check(seen, first):
    assert len(seen) == 1, "one fused all-reduce"
    thread, stack = seen[0]
    assert thread is threading.current_thread()
    assert stack[0].function == first
    listed = "\n".join(f"{hop.file}: {hop.function}" for hop in stack)
    assert len(stack) <= MAX_FUNCTIONS, listed
    assert len({hop.file for hop in stack}) <= MAX_FILES, listed


def test_run(hops):
    strategy = stratagem.MirroredStrategy(["cpu:0", "cpu:1"])
    rows = stratagem.PerReplica([np.float32(1), np.float32(2)])
    total = strategy.run(lambda x: stratagem.get_replica_context().all_reduce("SUM", x), (rows,))
    assert float(total.values[0]) == 3.0
    check(hops, "Strategy.run")


def test_run_of_a_training_step(hops):
    strategy = stratagem.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD()
        optimizer.build(model.trainable_variables)

    def step(x):
        with stratagem.GradientTape() as tape:
            loss = stratagem.nn.compute_average_loss(model(x)[:, 0])
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    rows = np.ones((2, 2), "float32")
    strategy.run(step, (stratagem.PerReplica([rows, rows]),))
    check(hops, "Strategy.run")


def test_run_with_uneven_rows(hops):
    strategy = stratagem.MirroredStrategy(["cpu:0", "cpu:1"])
    rows = stratagem.PerReplica([np.ones(2, "float32"), np.ones(1, "float32")])
    strategy.run(lambda x: stratagem.get_replica_context().all_reduce("SUM", x.sum()), (rows,))
    check(hops, "Strategy.run")


def test_run_with_an_all_gather(monkeypatch):
    """Gathers take the same road."""
    depths = []
    gather = jax.lax.all_gather

    def recording(*args, **kwargs):
        frame, names = sys._getframe(1), []
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):
                names.append(frame.f_code.co_qualname)
            frame = frame.f_back
        depths.append(names[::-1])
        return gather(*args, **kwargs)

    monkeypatch.setattr(jax.lax, "all_gather", recording)
    strategy = stratagem.MirroredStrategy(["cpu:0", "cpu:1"])
    rows = stratagem.PerReplica([np.ones(2, "float32"), np.ones(2, "float32")])
    strategy.run(lambda x: stratagem.get_replica_context().all_gather(x, 0), (rows,))
    (names,) = depths
    assert names[0] == "Strategy.run"
    assert len(names) <= MAX_FUNCTIONS, names
