"""Which devices take part, and the links between them, level by level."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from stratagem.planning.machines import Link, Machine


@dataclass(frozen=True)
class Level:
    """Links that join `members`: devices, or groups of the level below.

    Attributes:
        name: of the links.
        members: how many are joined.
        alpha: seconds for a message of no bytes.
        rounds: messages one after the other in a ring over all members, there and back.
        bandwidth: bytes a second out of one member, all its devices together, in one direction.
        stream: bytes a second between one pair of devices.
    """

    name: str
    members: int
    alpha: float
    rounds: int
    bandwidth: float
    stream: float


@dataclass(frozen=True)
class Topology:
    """Devices of one kind, as `--topology` names them.

    Attributes:
        machine: their constants.
        shape: sides of a TPU slice; devices a machine and machines otherwise.
    """

    machine: Machine
    shape: tuple[int, ...]

    @property
    def devices(self) -> int:
        """How many there are."""
        return math.prod(self.shape)

    @property
    def per_group(self) -> int:
        """Devices that the inner level joins: of a machine, of the largest slice."""
        if self.machine.kind == "tpu":
            return self.machine.links[0].size or self.devices
        return self.shape[0]

    def levels(self, devices: int) -> tuple[Level, ...]:
        """The links between so many devices of this kind, from the inside out.

        Groups are filled one after the other; the last one may be smaller.
        """
        inner = min(devices, self.per_group)
        outer = -(-devices // inner)
        one, other = self.machine.links
        found = (_inner(one, inner, self._sides(inner)), _outer(other, outer, inner))
        return tuple(level for level in found if level.members > 1)

    def _sides(self, devices: int) -> tuple[int, ...]:
        if devices == self.devices:
            return self.shape
        return _even_sides(devices, self.machine.links[0].torus)

    def __str__(self) -> str:
        return f"{self.machine.name}:{'x'.join(map(str, self.shape))}"


def parse(text: str, machines: Mapping[str, Machine]) -> Topology:
    """The topology that `"v5e:8x8"`, `"h100:8x16"` (8 GPUs x 16 machines) or `"cpu:4"` names.

    Raises:
        ValueError: malformed, or an unknown machine.
    """
    match = re.fullmatch(r"(\w+):([1-9]\d*(?:x[1-9]\d*)*)", text)
    if match is None:
        raise ValueError(
            "--topology: expected a machine and its shape, such as v5e:8x8 (chips), h100:8x16 "
            f"(GPUs a machine x machines) or cpu:4. Got {text!r}."
        )
    if match[1] not in machines:
        raise ValueError(
            f"--topology: expected one of the machines {', '.join(sorted(machines))}. Got "
            f"{match[1]!r}. Describe another one in the file that --calibrate writes."
        )
    machine = machines[match[1]]
    shape = tuple(map(int, match[2].split("x")))
    if machine.kind != "tpu":
        if len(shape) > 2:
            raise ValueError(
                f"--topology: expected devices a machine x machines for {machine.name}. Got "
                f"{text!r}."
            )
        return Topology(machine, (*shape, 1) if len(shape) == 1 else shape)
    most = machine.links[0].size
    axes = machine.links[0].torus
    if len(shape) > axes or (most and math.prod(shape) > most):
        raise ValueError(
            f"--topology: expected a slice of {machine.name} of at most {axes} sides and {most} "
            f"chips. Got {text!r}."
        )
    return Topology(machine, shape)


def _inner(link: Link, members: int, sides: tuple[int, ...]) -> Level:
    if not link.torus:
        stream = link.stream or link.bandwidth
        rounds = 2 * (members - 1)
        return Level(link.name, members, link.alpha, rounds, link.bandwidth, stream)
    used = [side for side in sides if side > 1]
    # A ring sends both ways at once: an axis that wraps has two links a chip, else in effect one.
    rings = [bool(link.wraps) and side % link.wraps == 0 for side in used]
    lanes = sum(2 if ring else 1 for ring in rings)
    rounds = 2 * sum(s // 2 if ring else s - 1 for s, ring in zip(used, rings, strict=True))
    return Level(
        link.name, members, link.alpha, rounds, link.bandwidth * max(lanes, 1), link.bandwidth
    )


def _outer(link: Link, members: int, inner: int) -> Level:
    group = link.group_bandwidth or link.bandwidth * inner
    stream = link.stream or link.bandwidth or link.group_bandwidth
    return Level(link.name, members, link.alpha, 2 * (members - 1), group, min(stream, group))


def _even_sides(devices: int, axes: int) -> tuple[int, ...]:
    """The sides of a slice of so many chips that are most alike."""
    if axes <= 1:
        return (devices,)
    side = next(s for s in range(round(devices ** (1 / axes)), 0, -1) if devices % s == 0)
    return (side, *_even_sides(devices // side, axes - 1))
