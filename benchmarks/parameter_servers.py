"""What grows with a cluster of parameter servers, and what must not.

    python benchmarks/parameter_servers.py [scale] [init] [restore] [--rounds 3] [--json FILE]

- scale: steps per second of the lookup case (see `cases/ps_problems.py`) for 1 and 2 ps with 1, 2
  and 4 workers, in turns; ratios to 1 ps and 2 workers are taken within a round.
- init: a table of 4 GB initialised on 2 ps: seconds, and the coordinator's peak memory (goal: at
  most 1.5 GB).
- restore: a table with Adagrad's slot, saved from 2 ps, restored on 3 and on 1: seconds, and
  whether every row and every slot is the same.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import stratagem  # before Keras

# isort: split
import keras
import numpy as np
from cases import ps_tasks

CASES = Path(__file__).resolve().parent / "cases"
PARTS = ("scale", "init", "restore")
SHAPES = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4))
TASK = "ps_task_stratagem.py"
STEPS, SAMPLES = 100, 3
ROWS_4GB, WIDTH = 16_000_000, 64
ROWS_RESTORED = 200_001  # divides by neither number of ps


def strategy_on(cluster: dict[str, list[str]], **how: Any) -> Any:
    """Tables are divided over all ps."""
    resolver = stratagem.cluster_resolver.SimpleClusterResolver(
        stratagem.cluster_resolver.ClusterSpec(cluster)
    )
    partitioner = stratagem.experimental.partitioners.FixedShardsPartitioner(len(cluster["ps"]))
    return stratagem.ParameterServerStrategy(resolver, partitioner, **how)


def scale(rounds: int) -> dict[str, Any]:
    """Steps per second for each shape of the cluster and kind of ids."""
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for ids in ("uniform", "zipf"):
            for ps, workers in SHAPES:
                command = [sys.executable, CASES / "ps_stratagem.py", ids, str(ps), str(workers)]
                command += ["--steps", str(STEPS), "--samples", str(SAMPLES)]
                said = subprocess.run(
                    command, input="\n" * SAMPLES, stdout=subprocess.PIPE, text=True, check=True
                ).stdout
                samples = [json.loads(line)["sample"] for line in said.splitlines()
                           if line.startswith('{"sample"')]  # fmt: skip
                name = f"{ids} ids, {ps} ps, {workers} workers"
                found.setdefault(name, []).append(statistics.median(samples))
    for name, samples in found.items():
        base = found[f"{name.partition(',')[0]}, 1 ps, 2 workers"]
        ratio = statistics.median(a / b for a, b in zip(samples, base, strict=True))
        print(f"{name}: {statistics.median(samples):.1f} steps/s ({min(samples):.1f} to "
              f"{max(samples):.1f}), {ratio:.2f} of 1 ps and 2 workers")  # fmt: skip
    return found


def init() -> dict[str, Any]:
    """A table of 4 GB, made on the ps."""
    with ps_tasks.running(TASK, 2, 1) as (cluster, _):
        strategy = strategy_on(cluster)
        start = time.perf_counter()
        with strategy.scope():
            table = keras.layers.Embedding(ROWS_4GB, WIDTH)
            table.build((None,))
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        strategy.close()
    print(f"table of {ROWS_4GB * WIDTH * 4 / 1e9:.1f} GB on 2 ps: {seconds:.1f} s, coordinator's "
          f"peak memory {peak / 1e9:.2f} GB: {'met' if peak <= 1.5e9 else 'missed'}")  # fmt: skip
    return {"seconds": seconds, "peak": peak}


def restore() -> dict[str, Any]:
    """Trains and saves on 2 ps; restores on 3 and on 1; compares everything."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "saved.weights.h5")
        for ps in (2, 3, 1):
            with ps_tasks.running(TASK, ps, 1) as (cluster, _):
                strategy = strategy_on(cluster)
                model = _small_model(strategy)
                start = time.perf_counter()
                if ps == 2:
                    ids = np.arange(ROWS_RESTORED, dtype=np.int32)[:, None]
                    model.fit(ids, np.sin(ids[:, 0]), batch_size=10_000, verbose=0)
                    model.save_weights(path)
                    wanted = _content(model)
                else:
                    model.load_weights(path)
                    seconds = time.perf_counter() - start
                    same = all(map(np.array_equal, wanted, _content(model)))
                    found[f"{ps} ps"] = {"seconds": seconds, "same": same}
                    print(f"from 2 ps to {ps}: {seconds:.1f} s, all the same: {same}")
                strategy.close()
    return found


def _small_model(strategy: Any) -> Any:
    with strategy.scope():
        layers = [keras.Input((1,), dtype="int32"), keras.layers.Embedding(ROWS_RESTORED, 16)]
        model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adagrad(0.1), "mse")
        model.optimizer.build(model.trainable_variables)
    return model


def _content(model: Any) -> list[np.ndarray]:
    """Weights and slots."""
    return [np.asarray(v.numpy()) for v in (*model.variables, *model.optimizer.variables)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    # A process's peak memory never falls: what is measured with it comes first.
    if not options.parts or "init" in options.parts:
        found["init"] = init()
    if not options.parts or "restore" in options.parts:
        found["restore"] = restore()
    if not options.parts or "scale" in options.parts:
        found["scale"] = scale(options.rounds)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
