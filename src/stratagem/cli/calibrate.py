"""`stratagem plan --calibrate`: measures this machine, and writes it as `cpu` for later plans."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import tomllib
from pathlib import Path

from stratagem import config
from stratagem.cli import calibrate_measure, calibrate_servers
from stratagem.planning.machines import Serving

_MINUTES = 5
_TEMPLATE = """\
[cpu]
title = {title}
kind = "cpu"
memory = {memory:.3e}
memory_bandwidth = {memory_bandwidth:.3e}
host_bandwidth = {host_bandwidth:.3e}
efficiency = 1.0
kernel_seconds = {kernel_seconds:.3e}
shared = {cores}
peak = {{ float32 = {product:.3e}, "conv float32" = {convolution:.3e}, other = {other:.3e} }}
source = {source}
[cpu.serving]
{serving}
[[cpu.levels]]
name = "memory"
alpha = {device_alpha:.3e}
bandwidth = {device_bandwidth:.3e}
[[cpu.levels]]
name = "processes"
alpha = {process_alpha:.3e}
group_bandwidth = {process_bandwidth:.3e}
"""


def act(path: Path) -> int:
    """Measures, and writes the file; the other machines in it are kept. Returns the exit code."""
    try:
        measured = measure()
    except subprocess.CalledProcessError as error:
        print(
            f"stratagem plan: error: --calibrate: expected {error.cmd[-1]!r} to be measured. Got "
            f"exit code {error.returncode}; its own message is above. Run stratagem doctor.",
            file=sys.stderr,
        )
        return 1
    except subprocess.TimeoutExpired as error:
        print(
            f"stratagem plan: error: --calibrate: expected {error.cmd[-1]!r} to be measured within "
            f"{error.timeout:g} s. Got no end of it. Run it again when the machine has less to do, "
            "or stratagem doctor.",
            file=sys.stderr,
        )
        return 1
    path.parent.mkdir(parents=True, exist_ok=True)
    serving = "\n".join(f"{name} = {measured[name]:.3e}" for name in Serving.__dataclass_fields__)
    text = _TEMPLATE.format(**measured, **_facts(), serving=serving)
    path.write_text(_others(path) + text)
    print(text)
    print(f"written to {path}")
    return 0


def measure() -> dict[str, float]:
    """The constants, each kind in a process of its own, one after the other.

    Raises:
        CalledProcessError: one failed.
        TimeoutExpired: one did not end in time.
    """
    module = calibrate_measure.__name__
    alone = [sys.executable, "-m", module]
    pair = [sys.executable, "-m", "stratagem.cli", "run", "--workers", "2", "-m", module]
    found: dict[str, float] = {}
    server = [sys.executable, "-m", calibrate_servers.__name__]
    for command in ([*alone, "device"], [*alone, "devices"], [*pair, "processes"], server):
        environment = {k: v for k, v in config.environment().items() if k != "TF_CONFIG"}
        done = subprocess.run(
            command,
            env={**environment, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=60 * _MINUTES,
        )
        # Of a job, each line has its task in front; only the chief measures.
        (line,) = (x for x in done.stdout.splitlines() if calibrate_measure.MARK in x)
        found.update(json.loads(line.partition(calibrate_measure.MARK)[2]))
    return found


def _facts() -> dict[str, object]:
    cores = os.cpu_count() or 1
    source = f"Measured by stratagem plan --calibrate on {datetime.date.today()}."
    return {
        "title": json.dumps(f"{platform.machine()}, {cores} cores, virtual devices"),
        "memory": float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "cores": cores,
        "source": json.dumps(source),
    }


def _others(path: Path) -> str:
    """What the file has of machines other than `cpu`, as it stands there."""
    if not path.is_file():
        return ""
    tomllib.loads(path.read_text())  # or it would be cut at the wrong places
    kept, skipping = [], False
    for line in path.read_text().splitlines(keepends=True):
        if line.startswith("["):
            name = line.strip().strip("[]").partition(".")[0]
            skipping = name == "cpu"
        if not skipping:
            kept.append(line)
    return "".join(kept)
