"""From a program and a topology to the time of a step, and how that scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stratagem.planning.allreduce import OPS, PLATFORM, platform
from stratagem.planning.machines import Machine
from stratagem.planning.program import Program
from stratagem.planning.topology import Topology

MOST = 1 << 16  # devices, to which the curves go
WORTH = 1.5  # doubling the devices pays while it brings this much more rows a second
OPERATIONS, MEMORY, KERNELS = "operations", "memory traffic", "kernels"
_TOO_LARGE = "RESOURCE_EXHAUSTED"  # as compilers say it
_CLEARLY = 1.05
_GATHER_SHARE = 0.5  # an all-gather is the second half of an all-reduce


@dataclass(frozen=True)
class Step:
    """Seconds of one step on so many devices, each with the same number of rows.

    Attributes:
        devices: how many.
        compute: of one device, by the roofline and for each kernel.
        kernels: of it, what the kernels take however small they are.
        limit: what most of it is: "operations", "memory traffic" or "kernels".
        reduce: of all collectives; not hidden behind computing.
        input: of the batch's way to the devices, hidden behind the rest where that is longer.
    """

    devices: int
    compute: float
    kernels: float
    limit: str
    reduce: float
    input: float

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return max(self.compute + self.reduce, self.input)

    @property
    def bound(self) -> str:
        """What takes longest: `"input"`, `"all-reduce"`, or the `limit` of computing."""
        if self.input > self.compute + self.reduce:
            return "input"
        return "all-reduce" if self.reduce > self.compute else self.limit


@dataclass(frozen=True)
class Scaling:
    """One cross-device op from 1 to 65,536 devices, at the planned number of rows a device.

    Attributes:
        op: its name.
        devices: numbers of devices, doubling.
        seconds: of a step.
        efficiency: rows a second and device, relative to one device.
        pays_to: the most devices to which each doubling brought `WORTH` times the rows a second.
    """

    op: str
    devices: tuple[int, ...]
    seconds: tuple[float, ...]
    efficiency: tuple[float, ...]
    pays_to: int


@dataclass(frozen=True)
class Plan:
    """All that is predicted.

    Attributes:
        topology: what was asked for.
        program: what was counted.
        steps: the planned step by cross-device op, the fastest first.
        scaling: likewise, in the same order.
        wins: the fastest op by devices: from how many on, and which.
        notes: what a reader must know to judge the figures.
    """

    topology: Topology
    program: Program
    steps: Mapping[str, Step]
    scaling: tuple[Scaling, ...]
    wins: tuple[tuple[int, str], ...]
    notes: tuple[str, ...]

    @property
    def op(self) -> str:
        """The cross-device op to choose."""
        return next(iter(self.steps))

    @property
    def step(self) -> Step:
        """The planned step, with that op."""
        return self.steps[self.op]

    @property
    def rows_per_second(self) -> float:
        """All devices together; 0 where the rows are not known."""
        return self.program.rows / self.step.seconds

    @property
    def fits(self) -> bool:
        """Whether a device's memory holds the step."""
        refused = self.program.refused.startswith(_TOO_LARGE)
        return not refused and self.program.memory <= self.topology.machine.memory


def plan(program: Program, topology: Topology) -> Plan:
    """Predicts the step on the topology with every cross-device op, and how each scales."""
    counts = tuple(1 << k for k in range(MOST.bit_length()))
    here = {op: step(program, topology, topology.devices, op) for op in OPS}
    fixed = topology.machine.kind == "tpu"  # TPUStrategy has no choice of ops
    steps = dict(
        sorted(
            here.items(),
            key=lambda item: (fixed and item[0] != PLATFORM, _rank(item[0], item[1].seconds)),
        )
    )
    scaling = tuple(_scaling(program, topology, counts, op) for op in steps)
    return Plan(topology, program, steps, scaling, _wins(scaling), _notes(program, topology))


def step(program: Program, topology: Topology, devices: int, op: str) -> Step:
    """The parts of one step on `devices` devices of the topology's kind."""
    machine = topology.machine
    inside = min(devices, topology.per_group)
    own = levels = topology.levels(devices)
    if op != PLATFORM:  # Each of its messages is a kernel, and so is what combines it.
        more = 2 * machine.kernel_seconds
        own = tuple(replace(level, alpha=level.alpha + more) for level in levels)
    reduce = 0.0
    if levels:
        reduce = sum(OPS[op](own, n) for n in program.reduced(devices))
        reduce += sum(_GATHER_SHARE * platform(levels, devices * n) for n in program.gathers)
    work, kernels, limit = _computing(program, machine, inside)
    return Step(
        devices,
        work + kernels,
        kernels,
        limit,
        reduce,
        (inside if machine.shared else 1) * program.arguments / machine.host_bandwidth,
    )


def compute(program: Program, machine: Machine, inside: int = 1) -> float:
    """Seconds of one device for one replica's part, without collectives.

    The roofline (Williams, Waterman, Patterson, CACM 52(4), 2009): as long as the operations take
    or as the bytes take, whichever is longer; and each kernel some time of its own. Virtual devices
    take turns: one alone uses all cores for what is large, but a single core for each kernel's own
    time.

    Args:
        program: the counted step.
        machine: whose constants.
        inside: devices of the same machine, which matters where they share it.
    """
    work, kernels, _ = _computing(program, machine, inside)
    return work + kernels


def _computing(program: Program, machine: Machine, inside: int) -> tuple[float, float, str]:
    """Seconds by the roofline, those of kernels, and what is most of both together."""
    operations = sum(n / machine.flops(dtype) for dtype, n in program.operations.items())
    moved = program.bytes if program.compiled is None else program.compiled.bytes
    turns = inside if machine.shared else 1
    queue = max(1.0, turns / machine.shared) if machine.shared else 1.0
    memory = moved / machine.memory_bandwidth
    work = turns * max(operations, memory)
    kernels = queue * program.kernels * machine.kernel_seconds
    if kernels > work:
        return work, kernels, KERNELS
    return work, kernels, OPERATIONS if operations > memory else MEMORY


def _rank(op: str, seconds: float) -> float:
    """Another op must be clearly faster than the platform's own, whose details are not known."""
    return seconds if op == PLATFORM else _CLEARLY * seconds


def _scaling(program: Program, topology: Topology, counts: Sequence[int], op: str) -> Scaling:
    seconds = tuple(step(program, topology, p, op).seconds for p in counts)
    efficiency = tuple(seconds[0] / s for s in seconds)
    pays_to = counts[0]
    for i in range(1, len(counts)):
        if 2 * seconds[i - 1] / seconds[i] < WORTH:
            break
        pays_to = counts[i]
    return Scaling(op, tuple(counts), seconds, efficiency, pays_to)


def _wins(scaling: Sequence[Scaling]) -> tuple[tuple[int, str], ...]:
    """The fastest op by number of devices, from two on; each entry where another one takes over."""
    found: list[tuple[int, str]] = []
    in_order = sorted(scaling, key=lambda s: list(OPS).index(s.op))
    for i, devices in enumerate(in_order[0].devices[1:], start=1):
        best = min(in_order, key=lambda s: _rank(s.op, s.seconds[i])).op
        if not found or found[-1][1] != best:
            found.append((devices, best))
    return tuple(found)


def _notes(program: Program, topology: Topology) -> tuple[str, ...]:
    machine = topology.machine
    notes = []
    if not program.writes:
        notes.append(
            f"The first step that the script ran, {program.caught}, writes no trainable variable: "
            "it does not train. Let the script train first."
        )
    if program.refused:
        notes.append(
            "The compiler for these devices does not compile the step, so that the figures are "
            f"estimates. It says: {program.refused}"
        )
    if program.memory > machine.memory:
        notes.append(
            f"The step does not fit: {program.memory / 1e9:,.1f} GB on a device of "
            f"{machine.memory / 1e9:,.1f} GB. Take fewer rows a device, or a smaller type."
        )
    if program.idle:
        notes.append(
            f"{program.idle} of {program.replicas} replicas get no rows of a batch of "
            f"{program.rows}. Take a larger batch (--per-device-batch), or fewer devices."
        )
    elif program.rows % program.replicas:
        notes.append(
            f"A batch of {program.rows} rows does not divide by {program.replicas}: the largest "
            f"part, {program.rows_per_replica} rows, decides the time of the step."
        )
    if program.unknown:
        notes.append(
            f"{program.unknown} loops run an unknown number of times, and count as one turn: the "
            "operations are more."
        )
    if machine.shared:
        notes.append(
            "The devices of a machine are virtual and share its cores: more of them do not "
            "compute more."
        )
    return tuple(notes)
