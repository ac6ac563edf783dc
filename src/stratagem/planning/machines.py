"""The machines that `stratagem plan` knows: read from `machines.toml` and from the user's file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUILT_IN = Path(__file__).with_name("machines.toml")
_NUMBERS = ("memory", "memory_bandwidth", "host_bandwidth", "efficiency", "kernel_seconds")
_KINDS = ("cpu", "gpu", "tpu")


@dataclass(frozen=True)
class Link:
    """One level of a machine's network, as the file describes it. Units: bytes and seconds.

    Attributes:
        name: what it is called.
        alpha: seconds for a message of no bytes.
        bandwidth: of one device in one direction; of a torus, of one link in one direction.
        group_bandwidth: instead of it, of all devices of the level below together.
        stream: what one pair of devices can use; 0 for `bandwidth`, or `group_bandwidth`.
        size: the most members that it joins; 0 for no limit.
        torus: number of axes; 0 for a switch.
        wraps: side from which an axis of a torus is a ring; 0 for never.
    """

    name: str
    alpha: float
    bandwidth: float = 0.0
    group_bandwidth: float = 0.0
    stream: float = 0.0
    size: int = 0
    torus: int = 0
    wraps: int = 0


@dataclass(frozen=True)
class Serving:
    """What parameter servers and their workers cost on such machines. Units: bytes and seconds.

    Attributes:
        latency: one way between two machines.
        bandwidth: of a machine, in each direction.
        stream: of one connection, in each direction.
        encrypt: bytes a second that one task encrypts and decrypts, both together.
        message: of a core, for a request and its answer, at each end.
        row: of a ps, for a row that is looked up or updated, however short.
        copy: bytes a second that a ps copies into answers and out of requests.
        update: bytes of state a second that an update changes.
        dispatch: of the coordinator, for a closure.
        disk: bytes a second of a snapshot.
    """

    latency: float
    bandwidth: float
    stream: float
    encrypt: float
    message: float
    row: float
    copy: float
    update: float
    dispatch: float
    disk: float


@dataclass(frozen=True)
class Machine:
    """Constants of one kind of device and its network; `machines.toml` says what they mean."""

    name: str
    title: str
    kind: str
    memory: float
    memory_bandwidth: float
    host_bandwidth: float
    efficiency: float
    kernel_seconds: float
    peak: Mapping[str, float]
    links: tuple[Link, ...]
    source: str
    shared: int = 0
    serving: Serving | None = None  # where it is known what it costs to serve on it

    def flops(self, kind: str) -> float:
        """Operations a second that are reached.

        Args:
            kind: `"bfloat16"` for products, `"conv bfloat16"` for convolutions (products where
                the machine does not tell them apart), `"other"` for the rest.
        """
        plain = self.peak.get(kind.removeprefix("conv "), self.peak["other"])
        return self.peak.get(kind, plain) * self.efficiency


def load(calibrated: Path | None = None) -> dict[str, Machine]:
    """All machines by name; those of the user's file replace built-in ones.

    Args:
        calibrated: the user's file, which need not exist.

    Raises:
        ValueError: a file is malformed; names every fault.
    """
    machines = _read(BUILT_IN)
    if calibrated is not None and calibrated.is_file():
        machines.update(_read(calibrated))
    return machines


def _read(path: Path) -> dict[str, Machine]:
    try:
        tables = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(
            f"{path}: expected TOML. Got {error}. Correct it, or write it again with "
            "stratagem plan --calibrate."
        ) from error
    faults = [f"{name}: {fault}" for name, table in tables.items() for fault in _faults(table)]
    if faults:
        raise ValueError(
            f"{path}: expected machines as in {BUILT_IN.name} of stratagem. Got: "
            f"{'; '.join(faults)}. Correct it, or write it again with stratagem plan --calibrate."
        )
    return {name: _machine(name, table) for name, table in tables.items()}


def _faults(table: Any) -> list[str]:
    if not isinstance(table, dict):
        return ["is no table"]
    found = [f"{key} is no positive number" for key in _NUMBERS if not _positive(table.get(key))]
    if table.get("kind") not in _KINDS:
        found.append(f"kind is none of {', '.join(_KINDS)}")
    peak = table.get("peak")
    if not isinstance(peak, dict) or "other" not in peak or not all(map(_positive, peak.values())):
        found.append("peak has no positive numbers, 'other' among them")
    found += _serving_faults(table.get("serving"))
    levels = table.get("levels")
    if not isinstance(levels, list) or len(levels) != 2:
        return [*found, "levels are not two"]
    for i, level in enumerate(levels):
        known = set(Link.__dataclass_fields__)
        if unknown := sorted(set(level) - known):
            found.append(f"levels[{i}] has unknown {', '.join(unknown)}")
        widths = [key for key in ("bandwidth", "group_bandwidth") if _positive(level.get(key))]
        if "name" not in level or not _positive(level.get("alpha")) or len(widths) != 1:
            found.append(f"levels[{i}] needs name, alpha, and bandwidth or group_bandwidth")
    return found


def _serving_faults(table: Any) -> list[str]:
    if table is None:
        return []
    if not isinstance(table, dict):
        return ["serving is no table"]
    wanted = set(Serving.__dataclass_fields__)
    found = [f"serving.{key} is no positive number" for key in sorted(wanted)
             if not _positive(table.get(key))]  # fmt: skip
    if unknown := sorted(set(table) - wanted):
        found.append(f"serving has unknown {', '.join(unknown)}")
    return found


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _machine(name: str, table: dict[str, Any]) -> Machine:
    return Machine(
        name=name,
        title=table.get("title", name),
        kind=table["kind"],
        peak=table["peak"],
        links=tuple(Link(**level) for level in table["levels"]),
        source=" ".join(table.get("source", "").split()),
        shared=int(table.get("shared", 0)),
        serving=_serving(table.get("serving")),
        **{key: float(table[key]) for key in _NUMBERS},
    )


def _serving(table: dict[str, Any] | None) -> Serving | None:
    return None if table is None else Serving(**{k: float(v) for k, v in table.items()})
