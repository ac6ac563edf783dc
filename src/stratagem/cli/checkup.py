"""Whether a machine is fit for training: pure functions of what `machine.py` has read."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

from packaging.specifiers import SpecifierSet

from stratagem.cli.machine import Chips, Devices, Package, Resources
from stratagem.cluster.checks import Finding, Level

REHEARSE = "STRATAGEM_REHEARSE"
KNOWN = (
    REHEARSE,
    "STRATAGEM_ATTEMPT",
    "STRATAGEM_CLUSTER_KEY",
    "STRATAGEM_CLUSTER_KEY_FILE",
    "STRATAGEM_COORDINATION",
    "STRATAGEM_GUARDED_BY",
    "STRATAGEM_JOIN",
    "STRATAGEM_MIN_WORKERS",
    "STRATAGEM_SLURM_JOBS",
    "STRATAGEM_SLURM_OWN_GPUS",
    "STRATAGEM_STATE_DIR",
    "STRATAGEM_TASK_INDEX",
    "STRATAGEM_WAIT_FOR_REPLACEMENT",
)
"""Variables that some part of Stratagem reads."""

_SHOWN = re.compile(r"STRATAGEM_.*|JAX_.*|XLA_.*|NPROC|KERAS_BACKEND|CUDA_VISIBLE_DEVICES")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")
_LONG = 80  # Characters of a value that are shown.
_VISIBLE_GPUS, _PLATFORMS = "CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS"
# The oldest driver (first number of its version) that a CUDA release runs on, newest first.
_CUDA_DRIVERS = (("cuda13", 580), ("cuda12", 525))
_DEVICE_OF = {"NVIDIA": "GPU", "AMD": "GPU", "TPU": "TPU"}
_PLUGIN_OF = {"NVIDIA": "jax-cuda", "AMD": "jax-rocm", "TPU": "libtpu"}
_LITTLE_MEMORY = 1 << 30  # bytes


def check_versions(packages: Sequence[Package]) -> list[Finding]:
    """Whether what is installed is in the supported ranges; one finding for all that is fine."""
    found, fine = [], []
    for package in packages:
        name, supported = package.name, package.supported
        if package.installed is None:
            do = f'pip install "{name}{supported}"'
            found.append(Finding(Level.FAULT, "versions", f"{name} is not installed", do))
        elif not SpecifierSet(supported).contains(package.installed, prereleases=True):
            text = f"{name} {package.installed}; {package.by} supports {supported}"
            do = f'pip install "{name}{supported}"'
            if name == "python":
                do = f"Make an environment of Python {supported}, and install there."
            found.append(Finding(Level.FAULT, "versions", text, do))
        else:
            fine.append(f"{name} {package.installed}")
    return found + ([Finding(Level.FINE, "versions", ", ".join(fine))] if fine else [])


def check_devices(devices: Devices, environment: Mapping[str, str]) -> list[Finding]:
    """Whether JAX starts, and with which devices; whether Keras is on it."""
    found = []
    if devices.problem:
        text = "; ".join(filter(None, (devices.problem, _one_line(devices.complaints))))
        do = (
            f"Read what is said there. Look at {_PLATFORMS}, XLA_FLAGS and the driver first; an "
            "accelerator that another process holds cannot be started."
        )
        found.append(Finding(Level.FAULT, "devices", text, do))
    if devices.names:
        rehearsed = environment.get(REHEARSE)
        note = f". {REHEARSE}={rehearsed}: these stand for real ones" if rehearsed else ""
        found.append(Finding(Level.FINE, "devices", describe(devices.names) + note))
    if devices.keras_backend not in ("", "jax"):
        do = "Set KERAS_BACKEND=jax, and import stratagem before keras."
        text = f"expected the JAX backend. Got {devices.keras_backend!r}"
        found.append(Finding(Level.FAULT, "keras", text, do))
    elif devices.keras_backend:
        found.append(Finding(Level.FINE, "keras", "on its JAX backend"))
    return found


def check_chips(
    chips: Sequence[Chips],
    devices: Devices,
    environment: Mapping[str, str],
    jax_extras: Sequence[str],
    plugins: Mapping[str, str],
) -> list[Finding]:
    """Whether JAX can use the accelerators that the system shows, and what to install if not.

    Args:
        chips: what the system shows.
        devices: what JAX shows.
        environment: the variables of this process.
        jax_extras: the extras that the installed JAX can be installed with.
        plugins: the installed packages that let JAX use accelerators, and their versions.
    """
    found = []
    for chip in chips:
        what = f"{chip.kind} devices"
        if chip.problem:
            do = "Install or load the driver, and restart the machine or container."
            # The tool alone may be there, in an image for machines with and without GPUs.
            level = Level.FAULT if chip.count else Level.LOOK
            found.append(Finding(level, what, _one_line(chip.problem), do))
            continue
        seen = f"{chip.count} x {chip.name or chip.kind}"
        seen += f", driver {chip.driver}" if chip.driver else ""
        used = sum(name.startswith(_DEVICE_OF[chip.kind]) for name in devices.names)
        if reason := _hidden(chip, environment):
            text, do = (
                f"{seen}; {reason} is in force",
                f"Unset {reason.partition('=')[0]} to use all.",
            )
            found.append(Finding(Level.LOOK, what, text, do))
        elif used >= chip.count:
            found.append(Finding(Level.FINE, what, f"{seen}; JAX uses all"))
        else:
            said = f": {_one_line(devices.complaints)}" if devices.complaints else ""
            text = f"{seen}; JAX can use {used} of them{said}"
            found.append(Finding(Level.FAULT, what, text, _install(chip, jax_extras, plugins)))
    return found


def check_resources(resources: Resources) -> list[Finding]:
    """Cores and memory that training may use."""
    found = []
    cores = f"{resources.own_cores} of {resources.machine_cores} cores for this process"
    if resources.quota is not None and resources.quota < resources.own_cores:
        text = f"{cores}, but its container may use {resources.quota:g}"
        do = "Raise the container's CPU limit, or pin it to that many cores: it will be throttled."
        found.append(Finding(Level.LOOK, "cores", text, do))
    else:
        found.append(Finding(Level.FINE, "cores", cores))
    if resources.memory is not None and resources.available is not None:
        free, total = resources.available / 2**30, resources.memory / 2**30
        text = f"{free:.1f} of {total:.1f} GiB available"
        little = resources.available < _LITTLE_MEMORY
        do = "End what holds it, or raise the limit: a task that runs out of memory is killed."
        level = Level.LOOK if little else Level.FINE
        found.append(Finding(level, "memory", text, do if little else ""))
    return found


def check_environment(environment: Mapping[str, str]) -> list[Finding]:
    """The variables that matter, without secrets, and those that nobody reads."""
    found = []
    unknown = sorted(n for n in environment if n.startswith("STRATAGEM_") and n not in KNOWN)
    for name in unknown:
        close = difflib.get_close_matches(name, KNOWN, 1)
        do = f"Did you mean {close[0]}?" if close else "Unset it."
        found.append(Finding(Level.LOOK, "environment", f"{name} is read by nobody", do))
    shown = [
        f"{name}={'(set)' if _SECRET.search(name) else _cut(value)}"
        for name, value in sorted(environment.items())
        if _SHOWN.fullmatch(name) and name not in unknown
    ]
    return [*found, Finding(Level.FINE, "environment", ", ".join(shown) or "nothing set")]


def describe(names: Sequence[str]) -> str:
    """`["CPU:0", "GPU:0", "GPU:1"]` -> `"1 CPU, 2 GPU"`."""
    kinds = [name.partition(":")[0] for name in names]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)) or "none"


def _hidden(chip: Chips, environment: Mapping[str, str]) -> str:
    """The variable that keeps these chips from this process, as it is set."""
    platforms = environment.get(_PLATFORMS, "")
    names = {"NVIDIA": {"cuda", "gpu"}, "AMD": {"rocm", "gpu"}, "TPU": {"tpu"}}[chip.kind]
    if rehearsed := environment.get(REHEARSE):
        return f"{REHEARSE}={rehearsed}"
    if platforms and not names & set(platforms.lower().split(",")):
        return f"{_PLATFORMS}={platforms}"
    visible = environment.get(_VISIBLE_GPUS)
    if chip.kind == "NVIDIA" and visible is not None:
        shown = [part for part in visible.split(",") if part.strip() not in ("", "-1")]
        if len(shown) < chip.count:
            return f"{_VISIBLE_GPUS}={visible}"
    return ""


def _install(chip: Chips, jax_extras: Sequence[str], plugins: Mapping[str, str]) -> str:
    for name, version in plugins.items():
        if name.startswith(_PLUGIN_OF[chip.kind]):
            return (
                f"{name} {version} is installed: read what JAX says, end the processes that hold "
                "the devices, and see that it has the version that this jax asks for (`pip check`)."
            )
    if chip.kind == "TPU":
        return 'pip install "stratagem[tpu]"'
    if chip.kind == "AMD":
        extra = next((e for e in jax_extras if e.startswith("rocm")), "rocm")
        return f'pip install "jax[{extra}]"'
    major = chip.driver.partition(".")[0]
    for extra, least in _CUDA_DRIVERS:
        if extra in jax_extras and (not major.isdecimal() or int(major) >= least):
            return f'pip install "jax[{extra}]"'
    oldest = min(least for _, least in _CUDA_DRIVERS)
    return f"Install a driver of version {oldest} or newer: JAX supports none that is older."


def _one_line(text: str) -> str:
    return " / ".join(text.split("\n"))


def _cut(value: str) -> str:
    return value if len(value) <= _LONG else value[:_LONG] + "..."
