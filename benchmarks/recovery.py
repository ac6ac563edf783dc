"""Time from the death of a worker to the next finished step, and of the pause when one joins.

    python benchmarks/recovery.py [--kills 20] [--json FILE] [--seed 0] [--from-backup]

Three workers train 784-1024-10 with `fit`, started by `stratagem run --min-workers 2
--wait-for-replacement`. Again and again a random one is killed (SIGKILL) at a random moment, and
its replacement awaited. Both survivors are measured each time; the slower one counts:

- told: from the kill until the survivor's program knows it (the clock of the machine),
- together: new coordination service and devices, agreeing on the step,
- step: trace, compile or find in the persistent cache, and run the step on the devices there are;
  of which `trace`, `lower` and `compile`, as JAX says (also of small programs around the step),
- all: the sum; the next finished step.

For who joins: the pause of the survivors, from the step in which they are told.

With `--from-backup` two workers have a backup every ten steps, and the group is started again by
`stratagem run --max-restarts`. The slower one counts:

- restart: from the kill until a new process begins; the others of the group are ended meanwhile,
- import: Python, JAX, Keras and this package,
- together: the strategy, until all have met,
- model: made and compiled (in Keras' sense),
- restore: of the backup, until the first step begins,
- step: as above; and all.
"""

from __future__ import annotations

import argparse
import collections
import itertools
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
import psutil
from rich.console import Console
from rich.table import Table

WORKERS, BATCH, CALM_STEPS = 3, 192, 10
PAIR = 2  # workers of a job that is restarted from its backup
SECONDS = 120.0
MARK = "MEASURED "
PARTS = ("told", "together", "step", "trace", "lower", "compile", "all")
FROM_BACKUP = ("restart", "import", "together", "model", "restore", "step")
BACKUP_EVERY = 10
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


def work(backup: Path | None) -> None:
    """One worker; it is ended from outside."""
    import stratagem

    moments = [_began(), time.monotonic()]  # the ends of the parts of a restart
    strategy = stratagem.MultiWorkerMirroredStrategy()
    moments.append(time.monotonic())
    import keras
    import numpy as np

    tell = Tell()
    logging.getLogger("stratagem").addHandler(tell)
    index = strategy.cluster_resolver.task_id

    class Steps(keras.callbacks.Callback):
        since, size = 0, 0

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if len(moments) == len(FROM_BACKUP) - 2:
                moments.append(time.monotonic())
                tell.spent = dict.fromkeys(tell.spent, 0.0)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if len(moments) == len(FROM_BACKUP) - 1:
                moments.append(time.monotonic())
                say(kind="restarted", moments=moments, **tell.spent)
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
    callbacks: list[Any] = [Steps()]
    if backup is not None:
        folder = str(backup)
        callbacks.append(stratagem.callbacks.BackupAndRestore(folder, save_freq=BACKUP_EVERY))
    moments.append(time.monotonic())
    model.fit(rows, labels, batch_size=BATCH, epochs=10**6, verbose=0, callbacks=callbacks)


def _began() -> float:
    """When this process began, by the clock of `time.monotonic`."""
    return time.monotonic() - (time.time() - psutil.Process().create_time())


def measured(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """What the workers say, from what the launcher prints."""
    other: collections.deque[str] = collections.deque(maxlen=20)
    for line in lines:
        if MARK in line:
            yield json.loads(line.partition(MARK)[2])
        else:
            other.append(line)
    sys.exit(f"The job ended before the measurement did. It said last:\n{''.join(other)}")


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


def collect_restarts(
    job: subprocess.Popen[str], kills: int, draw: random.Random
) -> list[dict[str, float]]:
    """Kills workers of a job that is restarted from its backup, and measures; see the module."""
    said = measured(iter(job.stdout))  # type: ignore[arg-type]
    restarts: list[dict[str, float]] = []
    killed = None
    for _ in range(kills + 1):
        found, calm = [], {}
        while len(calm) < PAIR:
            one = next(said)
            if one["kind"] == "restarted" and killed is not None:
                found.append(_parts(one, killed))
            elif one["kind"] == "calm":
                calm[one["index"]] = one["pid"]
        if killed is not None:
            restarts.append(max(found, key=lambda one: one["all"]))
        if len(restarts) == kills:
            break
        time.sleep(1 + draw.random())  # a backup is there
        killed = time.monotonic()
        os.kill(calm[draw.choice(sorted(calm))], signal.SIGKILL)
    return restarts


def _parts(one: dict[str, Any], killed: float) -> dict[str, float]:
    """What a restarted worker says, as the lengths of the parts."""
    ends = [killed, *one["moments"]]
    parts = dict(zip(FROM_BACKUP, (b - a for a, b in itertools.pairwise(ends)), strict=True))
    return parts | {name: one[name] for name in EVENTS.values()} | {"all": ends[-1] - killed}


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
    rows = {f"lost: {part}": [one[part] for one in found["losses"]] for part in PARTS}
    rows["joins: pause of the others"] = found["joins"]
    _table(console, f"Recovery from memory, {WORKERS} workers, seconds", rows)


def show_restarts(console: Console, restarts: list[dict[str, float]]) -> None:
    """Prints the table."""
    rows = {part: [one[part] for one in restarts] for part in restarts[0]}
    _table(console, f"Restart from a backup, {PAIR} workers, seconds", rows)


def _table(console: Console, title: str, rows: dict[str, list[float]]) -> None:
    table = Table(title=title, title_justify="left")
    for heading in ("", "median", "quartiles", "longest", "n"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
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
    parser.add_argument("--from-backup", action="store_true", help="the group is restarted")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--backup", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.backup)
        return
    draw, restarted = random.Random(options.seed), options.from_backup
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the job too
    with tempfile.TemporaryDirectory() as cache:
        limits = ["--workers", str(PAIR if restarted else WORKERS)]
        limits += ["--max-restarts", str(options.kills)]
        if not restarted:
            limits += ["--min-workers", "2", "--wait-for-replacement", str(SECONDS)]
        command = [sys.executable, "-m", "stratagem.cli", "run", *limits, __file__, "--worker"]
        job = subprocess.Popen(
            [*command, *(["--backup", f"{cache}/backup"] if restarted else [])],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "XDG_CACHE_HOME": cache},
        )  # fmt: skip
        try:
            found: Any = (collect_restarts if restarted else collect)(job, options.kills, draw)
        finally:
            job.send_signal(signal.SIGINT)
            job.communicate()
    (show_restarts if restarted else show)(Console(), found)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
