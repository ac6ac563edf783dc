"""What there is on this machine: reads it, and judges nothing (`checkup.py` does)."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from stratagem.cli.probe import MARK

_PROBE_SECONDS = 90.0  # A TPU or a full machine takes long to start.
_SMI_SECONDS = 15.0
_TAIL = 3  # Last lines of what a process complained about.
_NEEDED = ("jax", "keras", "msgpack", "numba", "numpy", "pyzmq", "rich")
_LISTENS = "0A"  # In /proc/net/tcp.
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin", "libtpu")
_GOOGLE = "0x1ae0"
# As jax/_src/hardware_utils.py has them; that vendor makes network cards too.
_TPUS = {"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}


@dataclass(frozen=True)
class Package:
    """A package: the range of versions that is supported, by whom, and the installed one."""

    name: str
    supported: str
    by: str
    installed: str | None


@dataclass(frozen=True)
class Devices:
    """What JAX answers when it is asked for its devices.

    Args:
        names: as `config.list_devices` gives them.
        keras_backend: of Keras in that process.
        problem: why the answer is none, or not good; else empty.
        complaints: the last lines that it wrote to stderr.
    """

    names: tuple[str, ...] = ()
    keras_backend: str = ""
    problem: str = ""
    complaints: str = ""


@dataclass(frozen=True)
class Chips:
    """Accelerators that the system sees, whether JAX can use them or not.

    Args:
        kind: "NVIDIA", "AMD" or "TPU".
        count: how many.
        name: of the first.
        driver: its version, where that is known.
        problem: what the driver's own tool complains about; else empty.
    """

    kind: str
    count: int
    name: str = ""
    driver: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Resources:
    """Cores (of the machine, of this process, and the limit of its container) and memory, bytes."""

    machine_cores: int
    own_cores: int
    quota: float | None
    memory: int | None
    available: int | None


def packages() -> list[Package]:
    """Python and the packages that Stratagem needs; jaxlib as the installed JAX needs it."""
    try:
        needs = importlib.metadata.metadata("stratagem")
        own = [Requirement(text) for text in needs.get_all("Requires-Dist") or ()]
        pythons = str(needs["Requires-Python"])
    except importlib.metadata.PackageNotFoundError:
        return [Package("stratagem", "", "", None)]
    return [
        Package("python", pythons, "stratagem", platform.python_version()),
        Package("stratagem", "", "", version("stratagem")),
        *_packages(own, "stratagem", _NEEDED),
        *_packages(_requirements("jax"), "jax", ("jaxlib",)),
    ]


def version(name: str) -> str | None:
    """The installed version of a package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def extras(name: str) -> tuple[str, ...]:
    """The extras that an installed package can be installed with."""
    try:
        return tuple(importlib.metadata.metadata(name).get_all("Provides-Extra") or ())
    except importlib.metadata.PackageNotFoundError:
        return ()


def plugins() -> dict[str, str]:
    """The installed packages that let JAX use accelerators, and their versions."""
    found = {name: version(name) for name in _PLUGINS}
    return {name: got for name, got in found.items() if got is not None}


def devices(environment: Mapping[str, str], seconds: float = _PROBE_SECONDS) -> Devices:
    """Asks JAX, in another process, which is ended after `seconds`."""
    command = [sys.executable, "-m", "stratagem.cli.probe"]
    # A job that runs here keeps its memory.
    own = {**environment, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        written = error.stderr or b""
        text = written.decode(errors="replace") if isinstance(written, bytes) else written
        return Devices(problem=f"JAX does not start within {seconds:g} s", complaints=_tail(text))
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            read = json.loads(line.removeprefix(MARK))
            names, backend = tuple(read["devices"]), read["keras_backend"]
            return Devices(names, backend, read["problem"], _tail(done.stderr))
    problem = f"the process that starts JAX ends with {done.returncode}"
    return Devices(problem=problem, complaints=_tail(done.stderr))


def chips(root: Path = Path("/")) -> list[Chips]:
    """The accelerators that drivers and the PCI bus show."""
    return [found for found in (_nvidia(root), _amd(root), _tpus(root)) if found is not None]


def resources(root: Path = Path("/")) -> Resources:
    """Cores and memory, with the limits of this process' container (control groups v2)."""
    machine = os.cpu_count() or 1
    affinity = getattr(os, "sched_getaffinity", None)
    quota, period = (*_words(root / "sys/fs/cgroup/cpu.max"), "", "")[:2]
    lines = (line.split() for line in _text(root / "proc/meminfo").splitlines())
    sizes = {words[0]: int(words[1]) << 10 for words in lines if len(words) == 3}
    total, available = sizes.get("MemTotal:"), sizes.get("MemAvailable:")
    limit, used = (_text(root / f"sys/fs/cgroup/memory.{what}") for what in ("max", "current"))
    if total is not None and available is not None and limit.isdecimal():
        total = min(total, int(limit))
        stat = dict(line.split() for line in _text(root / "sys/fs/cgroup/memory.stat").splitlines())
        # What files fill is given back when it is needed.
        available = min(available, int(limit) - int(used or 0) + int(stat.get("inactive_file", 0)))
    return Resources(
        machine,
        len(affinity(0)) if affinity is not None else machine,
        int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None,
        total,
        available,
    )


def port_holder(port: int, root: Path = Path("/proc")) -> str | None:
    """The process that listens at a TCP port, as far as the kernel lets this user see it."""
    sockets = {
        f"socket:[{words[9]}]"
        for table in ("tcp", "tcp6")
        for words in map(str.split, _text(root / "net" / table).splitlines()[1:])
        if words[3] == _LISTENS and int(words[1].rpartition(":")[2], 16) == port
    }
    for process in root.glob("[0-9]*") if sockets else ():
        if sockets & set(_links(process / "fd")):
            return f"{_text(process / 'comm')} (process {process.name})"
    return None


def _packages(needs: list[Requirement], by: str, names: tuple[str, ...]) -> list[Package]:
    return [
        Package(need.name, str(need.specifier), by, version(need.name))
        for need in needs
        if need.name in names and need.marker is None
    ]


def _requirements(name: str) -> list[Requirement]:
    try:
        return [Requirement(text) for text in importlib.metadata.requires(name) or ()]
    except importlib.metadata.PackageNotFoundError:
        return []


def _nvidia(root: Path) -> Chips | None:
    count = len(list(root.glob("proc/driver/nvidia/gpus/*"))) or len(
        list(root.glob("dev/nvidia[0-9]*"))
    )
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Chips("NVIDIA", count) if count else None
    query = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Chips("NVIDIA", count, problem=f"nvidia-smi: {error}")
    rows = [line.rpartition(", ") for line in done.stdout.splitlines() if ", " in line]
    if done.returncode or not rows:
        return Chips("NVIDIA", count, problem=_tail(done.stdout + done.stderr) or "no GPUs")
    return Chips("NVIDIA", len(rows), rows[0][0], rows[0][2].strip())


def _amd(root: Path) -> Chips | None:
    nodes = root.glob("sys/class/kfd/kfd/topology/nodes/*/gpu_id")
    count = sum(_text(node) not in ("", "0") for node in nodes)
    return Chips("AMD", count) if count else None


def _tpus(root: Path) -> Chips | None:
    cards = root.glob("sys/bus/pci/devices/*")
    count = sum(
        _text(card / "vendor") == _GOOGLE and _text(card / "device") in _TPUS for card in cards
    )
    return Chips("TPU", count) if count else None


def _text(path: Path) -> str:
    """What a file says, nothing where it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _words(path: Path) -> list[str]:
    return _text(path).split()


def _links(directory: Path) -> Iterator[str]:
    try:
        names = os.listdir(directory)
    except OSError:  # Another user's process, or one that has just ended.
        return
    for name in names:
        try:
            yield os.readlink(directory / name)
        except OSError:
            continue


def _tail(text: str) -> str:
    return "\n".join(line for line in text.strip().splitlines()[-_TAIL:])
