"""Parameter servers under fire: a random process is killed again and again, and all rows counted.

    python benchmarks/chaos.py [--seconds 300] [--every 10] [--json FILE] [--plot FILE] [--seed 0]

Two workers and two parameter servers train a table and a dense layer, epoch after epoch; the
coordinator accounts for rows. In the disturbed run a random worker or ps is killed (SIGKILL) every
10 s and started again at once at the same address, as a supervisor does. Shown: the rows that each
epoch has trained (all of them, each once), kills by kind, pushes lost with servers as the
coordinator says, and the loss curve beside that of an undisturbed run of as many epochs.

(The coordinator itself is not killed here; that it resumes is a test of its own.)
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import stratagem  # noqa: F401  before Keras, whose backend it chooses

# isort: split
import keras
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent / "cases"))
import ps_tasks
from ps_stratagem import strategy_on

ROWS, BATCH, IDS, WIDTH, FIELDS = 100_000, 250, 20_000, 16, 8
SNAPSHOT_SECONDS = 5.0
PS, WORKERS = 2, 2


class Killer(threading.Thread):
    """Kills a random task every so often, and starts it again.

    Args:
        tasks: of the cluster.
        every: seconds between two kills.
        draw: random numbers.
    """

    def __init__(self, tasks: list[ps_tasks.Task], every: float, draw: random.Random):
        super().__init__(name="killer", daemon=True)
        self.kills: list[dict[str, Any]] = []
        self._tasks, self._every, self._draw = tasks, every, draw
        self._leave = threading.Event()

    def run(self) -> None:
        """Until `stop`."""
        due = time.monotonic() + self._every
        while not self._leave.wait(max(0.0, due - time.monotonic())):
            due += self._every  # from kill to kill, however long the restart takes
            task = self._draw.choice(self._tasks)
            self.kills.append({"at": time.monotonic(), "kind": task.kind, "index": task.index})
            task.end()
            task.start()
            task.wait_until_ready()

    def stop(self) -> None:
        """Ends it, and waits for a task that it is starting."""
        self._leave.set()
        self.join()


def data() -> tuple[np.ndarray, np.ndarray]:
    """Ids `[100000, 8]`, and labels that are linear in hidden values of the ids."""
    rng = np.random.default_rng(0)
    ids = np.minimum(rng.zipf(1.3, (ROWS, FIELDS)) - 1, IDS - 1).astype(np.int32)
    late = rng.normal(size=IDS)[ids].sum(1) + rng.normal(size=ROWS) > 0
    return ids, late.astype(np.float32)


class Rows(keras.metrics.Metric):
    """Counts the rows that were trained."""

    def __init__(self) -> None:
        super().__init__(name="rows")
        self.count = self.add_weight(shape=(), initializer="zeros", name="count")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds the rows of a batch; rows that only fill it up weigh nothing."""
        ones = keras.ops.ones(keras.ops.shape(y_true)[:1])
        weights = ones if sample_weight is None else keras.ops.reshape(sample_weight, (-1,))
        self.count.assign_add(keras.ops.sum(weights))

    def result(self) -> Any:
        """Rows since the epoch began."""
        return self.count.value


def build() -> Any:
    """A compiled model of ids."""
    ids = keras.Input((FIELDS,), dtype="int32")
    pooled = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(IDS, WIDTH)(ids))
    logit = keras.layers.Dense(1)(keras.layers.Dense(32, activation="relu")(pooled))
    model = keras.Model(ids, keras.layers.Reshape(())(logit))
    model.compile(
        keras.optimizers.Adagrad(0.1), keras.losses.BinaryCrossentropy(from_logits=True),
        weighted_metrics=[Rows()],
    )  # fmt: skip
    return model


def train(seconds: float, epochs: int | None, every: float | None, seed: int) -> dict[str, Any]:
    """One run: of so many epochs, or of as many as fit in so many seconds."""
    ids, labels = data()
    begin = time.monotonic()

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epochs is None and time.monotonic() - begin > seconds:
                self.model.stop_training = True

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {"STRATAGEM_STATE_DIR": folder}),  # for the tasks too
        ps_tasks.running("ps_task_stratagem.py", PS, WORKERS) as (cluster, tasks),
    ):
        strategy = strategy_on(cluster, state_dir=folder, snapshot_seconds=SNAPSHOT_SECONDS)
        keras.utils.set_random_seed(seed)
        with strategy.scope():
            model = build()
        killer = Killer(tasks, every or seconds, random.Random(seed))
        if every is not None:
            killer.start()
        try:
            history = model.fit(
                ids, labels, batch_size=BATCH, epochs=epochs or 10**6, verbose=0,
                callbacks=[Stop()],
            ).history  # fmt: skip
        finally:
            if every is not None:
                killer.stop()
        dispatcher = strategy.coordinator.dispatcher
        found = {
            "loss": history["loss"],
            "rows": [int(rows) for rows in history["rows"]],
            "seconds": time.monotonic() - begin,
            "kills": killer.kills,
            "reruns": dispatcher.counts.reruns,
            "lost_pushes": getattr(dispatcher, "lost_pushes", None),
        }
        strategy.close()
    return found


def show(calm: dict[str, Any], disturbed: dict[str, Any]) -> bool:
    """Prints what happened; says whether all rows were counted."""
    kinds = Counter(kill["kind"] for kill in disturbed["kills"])
    kills = ", ".join(f"{count} times a {kind}" for kind, count in sorted(kinds.items()))
    wrong = [rows for rows in disturbed["rows"] if rows != ROWS]
    print(f"{len(disturbed['loss'])} epochs of {ROWS:,} rows; killed: {kills or 'nobody'}")
    print(f"epochs with another number of rows: {len(wrong)} {wrong[:5]}")
    print(f"pushes lost with servers, at most: {disturbed['lost_pushes']}")
    print(f"seconds: {calm['seconds']:.0f} undisturbed, {disturbed['seconds']:.0f} disturbed")
    print(f"last loss: {calm['loss'][-1]:.5f} undisturbed, {disturbed['loss'][-1]:.5f} disturbed")
    return not wrong


def plot(calm: dict[str, Any], disturbed: dict[str, Any], path: Path) -> None:
    """Draws both loss curves."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for name, run in (("undisturbed", calm), ("a process killed every 10 s", disturbed)):
        axis.plot(range(1, len(run["loss"]) + 1), run["loss"], label=name)
    axis.set(xlabel="epoch", ylabel="loss")
    axis.legend()
    figure.savefig(path, dpi=130)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--every", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("stratagem").addHandler(logging.StreamHandler())
    disturbed = train(options.seconds, None, options.every, options.seed)
    calm = train(options.seconds, len(disturbed["loss"]), None, options.seed)
    if options.json is not None:
        both = {"undisturbed": calm, "disturbed": disturbed}
        options.json.write_text(json.dumps(both, indent=1) + "\n")
    if options.plot is not None:
        plot(calm, disturbed, options.plot)
    return 0 if show(calm, disturbed) else 1


if __name__ == "__main__":
    sys.exit(main())
