"""`fit` in which things happen to workers; for `stratagem run`.

Arguments: folder for results and the backup, and JSON: `data` ("arrays" or "distributed"),
`steps_per_execution`, `backup` (None or its `save_freq`), and `events`, each a worker, a number of
training steps on these processes before which it happens, and what: "kill", "terminate" (SIGTERM)
or "wait" (for a replacement). Nothing happens to who joins, nor after a restart of the group.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
from rejoin import BATCH, EPOCHS, ROWS, SECONDS, Count, digest

import stratagem
from stratagem import data


def happens(strategy: Any, events: list[Any]) -> None:
    """Does the events of this worker in the middle of `fit`, and of its executions."""
    member, index = strategy.job.member, strategy.cluster_resolver.task_id
    run, mine = member.run, {step: what for who, step, what in events if who == index}
    steps = 0

    def eventful(work: Any, doing: str) -> Any:
        nonlocal steps
        what = mine.pop(steps, None) if "train step" in doing else None
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + SECONDS
        while what == "wait" and not (member.others_wait or member.has_changed):
            assert time.monotonic() < deadline, "no replacement"
            time.sleep(0.005)
        result = run(work, doing)
        steps += "train step" in doing
        return result

    member.run = eventful


def train(strategy: Any, how: dict[str, Any], callbacks: list[Any]) -> tuple[Any, Any]:
    rows = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")
    target = rows.sum(axis=1, keepdims=True)
    given: dict[str, Any] = {"x": rows, "y": target, "batch_size": BATCH, "shuffle": False}
    if how["data"] == "distributed":
        batches = data.batches((rows, target), BATCH)
        given = {"x": strategy.experimental_distribute_dataset(batches)}
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
        model.compile(
            keras.optimizers.Adam(0.01), "mse", metrics=[Count()],
            steps_per_execution=how["steps_per_execution"],
        )  # fmt: skip
    history = model.fit(**given, epochs=EPOCHS, callbacks=callbacks, verbose=0)
    return model, history.history


def undisturbed() -> list[float]:
    """The losses of one process."""
    keras.utils.set_random_seed(100)
    how = {"data": "arrays", "steps_per_execution": 1}
    return train(stratagem.OneDeviceStrategy("CPU:0"), how, [])[1]["loss"]


def main(folder: Path, how: dict[str, Any]) -> None:
    again = os.environ.get("STRATAGEM_JOIN") or os.environ["STRATAGEM_ATTEMPT"] != "0"
    strategy = stratagem.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(100)
    if not again:
        happens(strategy, how["events"])
    shares: list[int] = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: shares.append(strategy.num_replicas_in_sync)
    )
    callbacks: list[Any] = [note]
    if how["backup"]:
        callbacks.append(
            stratagem.callbacks.BackupAndRestore(
                str(folder / "backup"), how["backup"], save_before_preemption=True
            )
        )
    model, history = train(strategy, how, callbacks)
    result = {"history": history, "shares": shares, "digest": digest(model), "again": bool(again)}
    (folder / f"{strategy.cluster_resolver.task_id}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
