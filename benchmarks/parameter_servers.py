"""What grows with a cluster of parameter servers, and what must not.

    python benchmarks/parameter_servers.py [scale] [init] [restore] [--rounds 3] [--quick]

- scale: steps per second of the lookup case (see `cases/ps_problems.py`) for 1 and 2 ps with 1, 2
  and 4 workers, in turns; ratios to 1 ps and 2 workers are taken within a round.
- init: a table of 4 GB initialised on 2 ps: seconds, and the coordinator's peak memory (goal: at
  most 1.5 GB).
- restore: a table and a DynamicTable with Adagrad's slots, trained on 2 ps; the job's state is
  restored on 3 ps, and from there on 1. Seconds, and whether all rows and slots are the same bits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import stratagem  # before Keras

# isort: split
import keras
import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent / "cases"))
import ps_tasks
from ps_stratagem import strategy_on

CASES = Path(ps_tasks.__file__).parent
PARTS = ("scale", "init", "restore")
SHAPES = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4))
TASK = "ps_task_stratagem.py"
STEPS, SAMPLES = 100, 3
ROWS_4GB, WIDTH = 16_000_000, 64
ROWS_RESTORED = 200_001  # divides by neither number of ps


def scale(rounds: int, quick: bool = False) -> dict[str, Any]:
    """Steps per second for each shape of the cluster and kind of ids."""
    steps, samples = (20, 1) if quick else (STEPS, SAMPLES)
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for ids in ("uniform", "zipf"):
            for ps, workers in SHAPES:
                command = [sys.executable, CASES / "ps_stratagem.py", ids, str(ps), str(workers)]
                command += ["--steps", str(steps), "--samples", str(samples)]
                said = subprocess.run(
                    command, input="\n" * samples, stdout=subprocess.PIPE, text=True, check=True
                ).stdout
                speeds = [json.loads(line)["sample"] for line in said.splitlines()
                          if line.startswith('{"sample"')]  # fmt: skip
                name = f"{ids} ids, {ps} ps, {workers} workers"
                found.setdefault(name, []).append(statistics.median(speeds))
    for name, speeds in found.items():
        base = found[f"{name.partition(',')[0]}, 1 ps, 2 workers"]
        ratio = statistics.median(a / b for a, b in zip(speeds, base, strict=True))
        print(f"{name}: {statistics.median(speeds):.1f} steps/s ({min(speeds):.1f} to "
              f"{max(speeds):.1f}), {ratio:.2f} of 1 ps and 2 workers")  # fmt: skip
    return found


def init() -> dict[str, Any]:
    """A table of 4 GB, made on the ps and trained for a few steps."""
    ids = np.random.default_rng(0).integers(0, ROWS_4GB, (8 * 1024, 4)).astype(np.int32)
    with ps_tasks.running(TASK, 2, 1) as (cluster, tasks):
        strategy = strategy_on(cluster)
        start = time.perf_counter()
        with strategy.scope():
            table = keras.layers.Embedding(ROWS_4GB, WIDTH)
            table.build((None,))
        seconds = time.perf_counter() - start
        with strategy.scope():
            layers = [keras.Input((4,), dtype="int32"), table, keras.layers.Flatten()]
            model = keras.Sequential([*layers, keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(ids, np.sin(ids.sum(1)), batch_size=1024, verbose=0)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        there = sum(psutil.Process(t.pid).memory_info().rss for t in tasks if t.kind == "ps")
        strategy.close()
    print(f"table of {ROWS_4GB * WIDTH * 4 / 1e9:.1f} GB on 2 ps, which have {there / 1e9:.1f} GB "
          f"in memory: {seconds:.1f} s; coordinator's peak memory, 8 steps included, "
          f"{peak / 1e9:.2f} GB: {'met' if peak <= 1.5e9 else 'missed'}")  # fmt: skip
    return {"seconds": seconds, "peak": peak, "servers": there}


def restore() -> dict[str, Any]:
    """A job that is left on 2 ps goes on on 3, is left there, and goes on on 1; compares all."""
    found: dict[str, Any] = {}
    ids = np.arange(ROWS_RESTORED, dtype=np.int32)[:, None]
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {"STRATAGEM_STATE_DIR": folder}),  # for the tasks too
    ):
        with _left_job(2) as model:
            model.fit(ids, np.sin(ids[:, 0]), batch_size=10_000, verbose=0)
            wanted = _content(model)
        for before, ps in ((2, 3), (3, 1)):
            start = time.perf_counter()
            with _left_job(ps) as model:
                seconds = time.perf_counter() - start
                there = _content(model)
                same = len(wanted) == len(there) and all(map(_same_bits, wanted, there))
            count = sum(array.size for array in wanted)
            found[f"{before} to {ps} ps"] = {"seconds": seconds, "numbers": count, "same": same}
            print(f"from {before} ps to {ps}: {seconds:.1f} s with the start of the tasks, "
                  f"{count:,} numbers, all the same bits: {same}")  # fmt: skip
    return found


@contextlib.contextmanager
def _left_job(ps: int) -> Iterator[Any]:
    """A model on so many ps, which goes on where the job was left; left again with a snapshot."""
    with ps_tasks.running(TASK, ps, 1) as (cluster, _):
        strategy = strategy_on(cluster)
        keras.utils.clear_session()  # the same names again
        with strategy.scope():
            ids = keras.Input((1,), dtype="int32")
            tables = keras.layers.Embedding(ROWS_RESTORED, 16), stratagem.DynamicTable(16)
            found = keras.layers.Concatenate()([table(ids) for table in tables])
            model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(found)))
            model.compile(keras.optimizers.Adagrad(0.1), "mse")
            model.optimizer.build(model.trainable_variables)
        yield model
        written: Future[Exception | None] = Future()
        strategy.link.snapshot(written.set_result)
        if (error := written.result(60.0)) is not None:
            raise error
        strategy._leave(finished=False, stop_tasks=False)  # as when the program fails


def _content(model: Any) -> list[np.ndarray]:
    """Weights and slots; of a table without a preset size the ids, and their rows in order."""
    found = []
    for v in (*model.variables, *model.optimizer.variables):
        if v.remote_spec.dynamic is None:
            found.append(np.asarray(v.numpy()))
            continue
        ids, rows = v.items()
        order = np.argsort(ids)
        found += [ids[order], rows[order]]
    return found


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few steps: to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    # A process's peak memory never falls: what is measured with it comes first.
    if not options.parts or "init" in options.parts:
        found["init"] = init()
    if not options.parts or "restore" in options.parts:
        found["restore"] = restore()
    if not options.parts or "scale" in options.parts:
        found["scale"] = scale(options.rounds, options.quick)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
