"""Time from the death of a worker to the next finished step, and of the pause when one joins.

    python benchmarks/recovery.py [--kills 20] [--json FILE] [--seed 0]

Three workers train 784-1024-10 with `fit`, started by `stratagem run --min-workers 2
--wait-for-replacement`. Again and again a random one is killed (SIGKILL) at a random moment, and
its replacement awaited. Both survivors are measured each time; the slower one counts:

- told: from the kill until the survivor's program knows it (the clock of the machine),
- together: new coordination service and devices, agreeing on the step,
- step: trace, compile or find in the persistent cache, and run the step on the devices there are;
  of which `trace`, `lower` and `compile`, as JAX says (also of small programs around the step),
- all: the sum; the next finished step.

For who joins: the pause of the survivors, from the step in which they are told.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

WORKERS, BATCH, CALM_STEPS = 3, 192, 10
SECONDS = 120.0
MARK = "MEASURED "
PARTS = ("told", "together", "step", "trace", "lower", "compile", "all")
EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",  # or reading it from the cache
}


def say(**what: Any) -> None:
    """Tells the parent; `time.monotonic` is one clock for all processes of a machine."""
    print(MARK + json.dumps({"at": time.monotonic(), "pid": os.getpid(), **what}), flush=True)


class Tell(logging.Handler):
    """Passes on what the job says of a change, in figures."""

    def __init__(self) -> None:
        super().__init__()
        self.spent = dict.fromkeys(EVENTS.values(), 0.0)
        jax.monitoring.register_event_duration_secs_listener(self._add)

    def _add(self, event: str, seconds: float, **_: Any) -> None:
        if event in EVENTS:
            self.spent[EVENTS[event]] += seconds

    def emit(self, record: logging.LogRecord) -> None:
        """Of one record."""
        if isinstance(record.args, tuple) and len(record.args) == 6:
            why, members, _, _, together, step = record.args
            size = len(str(members).split(","))
            say(kind="changed", why=why, size=size, together=together, step=step, **self.spent)


def work() -> None:
    """One worker; it is ended from outside."""
    import stratagem

    strategy = stratagem.MultiWorkerMirroredStrategy()
    import keras
    import numpy as np

    tell = Tell()
    logging.getLogger("stratagem").addHandler(tell)
    index = strategy.cluster_resolver.task_id

    class Steps(keras.callbacks.Callback):
        since, size = 0, 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            now = strategy.num_replicas_in_sync
            self.since = self.since + 1 if now == self.size else 1
            self.size = now
            if self.since == CALM_STEPS:
                tell.spent = dict.fromkeys(tell.spent, 0.0)
                say(kind="calm", index=index, size=now)

    rows = np.random.default_rng(0).normal(size=(100 * BATCH, 784)).astype("float32")
    labels = np.arange(len(rows)) % 10
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Dense(1024, activation="relu"), keras.layers.Dense(10)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.001), loss)
    model.fit(rows, labels, batch_size=BATCH, epochs=10**6, verbose=0, callbacks=[Steps()])


def measured(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """What the workers say, from what the launcher prints."""
    for line in lines:
        if MARK in line:
            yield json.loads(line.partition(MARK)[2])


def collect(job: subprocess.Popen[str], kills: int, draw: random.Random) -> dict[str, Any]:
    """Kills workers of a job and measures; see the module."""
    said = measured(iter(job.stdout))  # type: ignore[arg-type]
    losses: list[dict[str, float]] = []
    joins: list[float] = []
    while len(joins) < kills:
        calm: dict[int, int] = {}
        while len(calm) < WORKERS:
            one = next(said)
            if one["kind"] == "calm" and one["size"] == WORKERS:
                calm[one["index"]] = one["pid"]
        time.sleep(draw.random())
        victim = calm[draw.choice(sorted(calm))]
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        losses.append(max(_changes(said, WORKERS - 1, killed), key=lambda one: one["all"]))
        joined = _changes(said, WORKERS, killed)
        joins.append(max(one["together"] + one["step"] for one in joined))
    return {"losses": losses, "joins": joins}


def _changes(said: Iterator[dict[str, Any]], size: int, killed: float) -> list[dict[str, float]]:
    """What both survivors say of a change to some number of workers."""
    found: list[dict[str, float]] = []
    while len(found) < WORKERS - 1:
        one = next(said)
        if one["kind"] == "changed" and one["size"] == size:
            every = one["at"] - killed
            parts = {name: one[name] for name in PARTS if name in one} | {"all": every}
            found.append({"told": every - one["together"] - one["step"], **parts})
    return found


def show(console: Console, found: dict[str, Any]) -> None:
    """Prints the table."""
    table = Table(title=f"Recovery from memory, {WORKERS} workers, seconds", title_justify="left")
    for heading in ("", "median", "quartiles", "longest", "n"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    rows = {f"lost: {part}": [one[part] for one in found["losses"]] for part in PARTS}
    rows["joins: pause of the others"] = found["joins"]
    for name, samples in rows.items():
        low, median, high = _quartiles(samples)
        quartiles = f"{low:.2f}-{high:.2f}"
        table.add_row(name, f"{median:.2f}", quartiles, f"{max(samples):.2f}", str(len(samples)))
    console.print(table)


def _quartiles(samples: Sequence[float]) -> list[float]:
    if len(samples) < 2:
        return [samples[0]] * 3
    return statistics.quantiles(samples, n=4, method="inclusive")


def main() -> None:
    """Runs the measurement, or one worker of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the job too
    with tempfile.TemporaryDirectory() as cache:
        limits = ["--min-workers", "2", "--max-restarts", str(options.kills)]
        limits += ["--wait-for-replacement", str(SECONDS)]
        command = [sys.executable, "-m", "stratagem.cli", "run", "--workers", str(WORKERS), *limits]
        job = subprocess.Popen(
            [*command, __file__, "--worker"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "XDG_CACHE_HOME": cache},
        )  # fmt: skip
        try:
            found = collect(job, options.kills, random.Random(options.seed))
        except StopIteration:
            sys.exit(
                "The job ended before the measurement did. Run its command by hand to see why."
            )
        finally:
            job.send_signal(signal.SIGINT)
            job.communicate()
    show(Console(), found)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
