"""`fit` that loses a worker, gets it back, and counts every row; for `stratagem run`.

Arguments: folder for results, rank that dies, step (of all training steps) before which it does,
step before which the others wait for the replacement, and for the last rank a step whose end it
misses, so that the others are one step ahead of it (-1 for each that does not happen).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

import stratagem
from stratagem.cluster import compilations

EPOCHS, ROWS, BATCH = 4, 44, 8
SECONDS = 60.0


class Count(keras.metrics.Metric):
    """Counts the rows of an epoch."""

    def __init__(self, name: str = "rows"):
        super().__init__(name=name)
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(keras.ops.sum(keras.ops.ones_like(y_true)))

    def result(self) -> Any:
        return self.total + 0.0


class Looks(logging.Handler):
    """Notes whether steps are found in the persistent cache, or compiled."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: list[bool] = []
        logger = logging.getLogger("jax._src.compiler")
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Of one program."""
        if record.args and record.args[0] == "jit_replica" and "cache" in record.msg.lower():
            self.found.append("hit" in record.msg)


class Fate(keras.callbacks.Callback):
    """Ends the process at a step, as a power cut does; or waits at a step for a replacement."""

    def __init__(self, strategy: Any, dies: int, waits: int, lost: int):
        super().__init__()
        self._strategy, self._dies, self._waits, self._step = strategy, dies, waits, 0
        self._lost, self._looks = lost, Looks()
        self.found: list[bool] = []
        self.shares: list[int] = []

    def get_state(self) -> int:
        return self._step

    def set_state(self, state: int) -> None:
        self._step = state

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._step == self._lost:
            compilations.finish()  # what is compiled ahead is there by then
            self._looks.found.clear()
        if self._step == self._dies:
            os.kill(os.getpid(), signal.SIGKILL)
        member, deadline = self._strategy.job.member, time.monotonic() + SECONDS
        while self._step == self._waits and not (member.others_wait or member.has_changed):
            if time.monotonic() > deadline:
                raise TimeoutError("no replacement")
            time.sleep(0.005)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._step == self._lost:
            self.found = [*self._looks.found]
        self._step += 1
        self.shares.append(self._strategy.num_replicas_in_sync)


def forget(strategy: Any, fate: Fate, step: int) -> None:
    """At a step, this process has news of a loss when all have computed, and before it knows."""
    member, run = strategy.job.member, strategy.job.member.run

    def late(work: Any, doing: str) -> Any:
        result = run(work, doing)
        if fate._step == step and "train step" in doing:
            deadline = time.monotonic() + SECONDS
            while not member.has_changed and time.monotonic() < deadline:
                time.sleep(0.005)
            member.run = run
            member.raise_if_changed()
        return result

    member.run = late


def digest(model: Any) -> str:
    """Of the bits of all variables."""
    found = [*model.variables, *model.optimizer.variables]
    return hashlib.sha256(b"".join(np.asarray(v.value).tobytes() for v in found)).hexdigest()


def build() -> Any:
    model = keras.Sequential(
        [
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae", Count()])
    return model


def train(strategy: Any, callbacks: list[Any]) -> Any:
    rows = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")
    target = rows.sum(axis=1, keepdims=True)
    with strategy.scope():
        model = build()
    history = model.fit(
        rows, target, batch_size=BATCH, epochs=EPOCHS, callbacks=callbacks, verbose=0,
        validation_data=(rows[:10], target[:10]),
    )  # fmt: skip
    return model, history.history


def undisturbed() -> dict[str, Any]:
    """What one process finds that nothing happens to."""
    keras.utils.set_random_seed(100)
    model, history = train(stratagem.OneDeviceStrategy("CPU:0"), [])
    return {
        "history": history,
        "weights": [np.asarray(w) for w in model.get_weights()],
        "iterations": int(model.optimizer.iterations.numpy()),
    }


def main(folder: Path, rank: int, dies: int, waits: int, forgets: int) -> None:
    joins = bool(os.environ.get("STRATAGEM_JOIN"))
    strategy = stratagem.MultiWorkerMirroredStrategy()
    index = strategy.cluster_resolver.task_id
    keras.utils.set_random_seed(100 + joins)  # who joins has other values at first
    dies, waits = (-1, -1) if joins else (dies, waits)
    fate = Fate(strategy, dies if index == rank else -1, waits, dies)
    if forgets >= 0 and index == 2 and not joins:
        forget(strategy, fate, forgets)
    model, history = train(strategy, [fate, keras.callbacks.EarlyStopping("loss", patience=9)])
    result = {
        "joined": joins,
        "history": history,
        "shares": fate.shares,
        "found": fate.found,
        "digest": digest(model),
        "taken back": strategy.job.lockstep.taken_back,
        "weights": [np.asarray(w).tolist() for w in model.get_weights()],
        "iterations": int(model.optimizer.iterations.numpy()),
    }
    (folder / f"{index}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:6]))
