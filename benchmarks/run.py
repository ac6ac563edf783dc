"""Compares Stratagem with TensorFlow, with Keras' DataParallel, and with JAX written by hand.

    python benchmarks/run.py [--peer PYTHON] [--quick] [--only CASE ...] [--out FOLDER]

Each contender of a case runs in a process of its own. They take turns, a sample of many steps
each, so that a slow moment of the machine meets all of them; a figure is the median of the
samples, a ratio is taken within a turn. Several rounds do this with new processes. `--peer` is the
Python of an environment with TensorFlow (`make bench` builds it); without it those contenders are
left out.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contenders import CASES, OURS, PEER, Case, Contender
from process import ContenderProcess
from report import Figures, plot, ratios, show
from rich.console import Console

HERE = Path(__file__).resolve().parent
COLLECTIVES = "collectives"


def available(contender: Contender, peer: Path | None) -> str | None:
    """Why a contender cannot run, or None."""
    if contender.python == OURS and contender.needs is None:
        return None
    if contender.python == PEER and peer is None:
        return "no --peer environment"
    package = contender.needs or "tensorflow"
    look = f"import importlib.util, sys; sys.exit(not importlib.util.find_spec({package!r}))"
    python = sys.executable if contender.python == OURS else peer
    missing = subprocess.run([str(python), "-c", look], check=False).returncode
    return f"{package} is not installed in the {contender.python} environment" if missing else None


def measure(
    case: Case, contenders: Sequence[Contender], pythons: dict[str, Path], rounds: int,
    quick: bool, console: Console,
) -> dict[str, Figures]:  # fmt: skip
    """All rounds of one case."""
    figures = {contender.name: Figures() for contender in contenders}
    steps, samples = case.quick if quick else (case.steps, case.samples)
    scale = 1e6 if case.lower_is_better else 1.0
    for number in range(rounds):
        with contextlib.ExitStack() as stack:
            running = {}
            for contender in contenders:
                console.print(
                    f"[dim]{case.title}: round {number + 1}/{rounds}, {contender.name}[/]"
                )
                process = ContenderProcess(contender, pythons[contender.python], steps, samples)
                running[contender.name] = stack.enter_context(process)
                figures[contender.name].firsts += process.read("first")
            names = list(running)
            for turn in range(samples):
                # Every second turn runs backwards: nobody always follows the same neighbour.
                for name in names if turn % 2 == 0 else names[::-1]:
                    figures[name].samples.append(scale * running[name].sample())
            for name, process in running.items():
                figures[name].loss, figures[name].about = process.read("loss", "about")
    return figures


def record(results: Sequence[tuple[Case, dict[str, Figures]]]) -> dict[str, Any]:
    """Everything measured, for JSON."""
    return {
        "machine": {
            "cores": os.cpu_count(),
            "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "load at the end": os.getloadavg()[0],
        },
        "cases": [
            {
                "title": case.title,
                "unit": case.unit,
                "contenders": {name: dataclasses.asdict(f) for name, f in figures.items()},
                "goals": [dataclasses.asdict(ratio) for ratio in ratios(case, figures)],
            }
            for case, figures in results
        ],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer", type=Path, metavar="PYTHON", help="a Python with TensorFlow")
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--rounds", type=int, help="new processes (default 3; quick 1)")
    parser.add_argument("--only", nargs="+", choices=[*CASES, COLLECTIVES], metavar="CASE",
                        help=f"some of {', '.join([*CASES, COLLECTIVES])}")  # fmt: skip
    parser.add_argument("--out", type=Path, default=HERE.parent / "out", metavar="FOLDER")
    options = parser.parse_args(arguments)
    rounds = options.rounds or (1 if options.quick else 3)
    wanted = options.only or [*CASES, COLLECTIVES]

    console, progress = Console(), Console(stderr=True, soft_wrap=True)
    pythons = {OURS: Path(sys.executable)}
    if options.peer is not None:
        pythons[PEER] = options.peer.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    results = []
    for name in (n for n in CASES if n in wanted):
        case, taking_part = CASES[name], []
        for contender in case.contenders:
            reason = available(contender, pythons.get(PEER))
            if reason is None:
                taking_part.append(contender)
            else:
                console.print(f"{name}: {contender.name} is left out: {reason}.")
        figures = measure(case, taking_part, pythons, rounds, options.quick, progress)
        results.append((case, figures))
        show(console, case, figures)
    if results:
        written = options.out / "bench.json", options.out / "bench.png"
        written[0].write_text(json.dumps(record(results), indent=2) + "\n")
        plot(results, written[1])
        console.print(f"Written: {written[0]}, {written[1]}")
    if COLLECTIVES in wanted:
        script, files = HERE / "collectives_bench.py", options.out / COLLECTIVES
        command = [sys.executable, script, "--json", f"{files}.json", "--plot", f"{files}.png"]
        subprocess.run([*command, *(["--quick"] if options.quick else [])], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
