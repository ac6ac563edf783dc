"""How the processes of a job communicate: tf.distribute's CommunicationOptions, all effective."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from stratagem.collectives.abstract import CrossDeviceOps
from stratagem.collectives.auto import AutoAllReduce
from stratagem.collectives.in_order import PacksInOrder
from stratagem.collectives.nccl import NcclAllReduce
from stratagem.collectives.ring import RingAllReduce

_START_SECONDS = 300.0
_STEP_SECONDS = 1800.0


class CommunicationImplementation(enum.Enum):
    """Which all-reduce the processes use."""

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """How the processes of a job communicate.

    Args:
        bytes_per_pack: an all-reduce of more bytes is made in packs of about this size, one
            after the other; 0 for one pack.
        timeout_seconds: how long a step may take, waiting for the other processes included, and
            the start may wait for their coming, before an error says who is missing; None for the
            defaults (the start: 300 s; a step, with what is done between two: 1800 s). After a
            minute in a step a warning says who is late. A process that is killed, stopped or out
            of reach is noticed at once, or after 10 s, whatever the deadline.
        implementation: RING sends messages around a ring of the replicas, NCCL leaves the
            all-reduce to XLA (NCCL on GPUs, Gloo on CPUs), AUTO is NCCL except between processes on
            CPUs, where it sends messages for what is not large (`AutoAllReduce`).

    Raises:
        ValueError: a negative number, or no CommunicationImplementation.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        problems = []
        if not isinstance(self.bytes_per_pack, int) or self.bytes_per_pack < 0:
            problems.append(f"bytes_per_pack={self.bytes_per_pack!r} is no number of bytes")
        if self.timeout_seconds is not None and not self.timeout_seconds > 0:
            problems.append(f"timeout_seconds={self.timeout_seconds!r} is not positive")
        if not isinstance(self.implementation, CommunicationImplementation):
            problems.append(f"implementation={self.implementation!r} is none")
        if problems:
            raise ValueError(
                "Expected bytes_per_pack >= 0, timeout_seconds > 0 or None, and an implementation "
                f"out of CommunicationImplementation. Got: {'; '.join(problems)}."
            )

    @classmethod
    def checked(cls, options: Any) -> CommunicationOptions:
        """The options, or the defaults for None.

        Raises:
            ValueError: something else was given.
        """
        if options is None:
            return cls()
        if not isinstance(options, cls):
            raise ValueError(
                f"Expected communication_options to be CommunicationOptions. Got {options!r}. "
                "Write CommunicationOptions(implementation=...)."
            )
        return options

    def merge(self, other: CommunicationOptions) -> CommunicationOptions:
        """These options, with those of the other that are not the default."""
        default = CommunicationOptions()
        changes = {
            field.name: getattr(other, field.name)
            for field in dataclasses.fields(self)
            if getattr(other, field.name) != getattr(default, field.name)
        }
        return dataclasses.replace(self, **changes)

    @property
    def start_seconds(self) -> float:
        """How long to wait for all processes at the start."""
        return _START_SECONDS if self.timeout_seconds is None else self.timeout_seconds

    @property
    def step_seconds(self) -> float:
        """How long a step may take."""
        return _STEP_SECONDS if self.timeout_seconds is None else self.timeout_seconds

    def cross_device_ops(self) -> CrossDeviceOps:
        """What combines the replicas' values."""
        ops: CrossDeviceOps = {
            CommunicationImplementation.AUTO: AutoAllReduce,
            CommunicationImplementation.RING: RingAllReduce,
            CommunicationImplementation.NCCL: NcclAllReduce,
        }[self.implementation]()
        return PacksInOrder(ops, self.bytes_per_pack) if self.bytes_per_pack else ops


def collective_hints(
    bytes_per_pack: int = 0, timeout_seconds: float | None = None
) -> CommunicationOptions:
    """The older name for options without an implementation (tf: CollectiveHints)."""
    return CommunicationOptions(bytes_per_pack, timeout_seconds)
