"""What is known of one step's program: the part of one replica, counted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Compiled:
    """What the compiler for the described devices says of the program, for one device.

    Attributes:
        name: of the compiler.
        arguments: bytes of state and arguments.
        outputs: bytes of results that are in no argument's place.
        temporary: bytes of values in between, and of the program itself.
        operations: as it counts them.
        bytes: read and written in device memory.
        all_reduces: in the compiled program.
    """

    name: str
    arguments: int
    outputs: int
    temporary: int
    operations: float
    bytes: float
    all_reduces: int

    @property
    def memory(self) -> int:
        """Bytes that a device needs."""
        return self.arguments + self.outputs + self.temporary


@dataclass(frozen=True)
class Program:
    """One replica's part of a step, counted in its traced program. Sizes are bytes.

    Attributes:
        caught: what ran it in the script, such as `"fit of model 'm'"`.
        strategy: what the script asked for: class names, in order.
        replicas: that it was traced for.
        rows: of a step, all replicas together; 0 where nothing says it.
        rows_per_replica: of the replica that has most.
        idle: replicas without rows.
        state: variables of model, optimizer and metrics.
        trainable: of it, the trainable variables that the step writes.
        arguments: of one replica.
        peak: most bytes of values in between that live at once.
        operations: by type of the products; `"other"` for the rest.
        bytes: read and written in device memory, when chains of simple operations are fused.
        kernels: products, reductions and the like, and the fused chains between them.
        reduces: of each fused all-reduce, in order.
        growing: of each, what grows with the number of replicas.
        gathers: of each all-gather, what one replica sends.
        writes: whether the step writes trainable variables.
        unknown: loops whose number of turns is not known; they count once.
        compiled: what a compiler says, where there is one.
        refused: why the compiler that there is does not compile it; empty where it does.
    """

    caught: str
    strategy: tuple[str, ...]
    replicas: int
    rows: int
    rows_per_replica: int
    idle: int
    state: int
    trainable: int
    arguments: int
    peak: int
    operations: Mapping[str, float]
    bytes: float
    kernels: int
    reduces: tuple[int, ...]
    growing: tuple[int, ...] = ()
    gathers: tuple[int, ...] = ()
    writes: bool = True
    unknown: int = 0
    compiled: Compiled | None = field(default=None)
    refused: str = ""

    @property
    def memory(self) -> int:
        """Bytes that a device needs: the compiler's word, else state, arguments and live values."""
        if self.compiled is not None:
            return self.compiled.memory
        return self.state + self.arguments + self.peak

    @property
    def total_operations(self) -> float:
        """Of one replica's part."""
        return sum(self.operations.values())

    def reduced(self, devices: int) -> list[float]:
        """Bytes of each all-reduce on so many devices; of a step for one, that of its gradients."""
        if self.replicas == 1:
            return [self.trainable] if self.trainable else []
        growing = self.growing or (0,) * len(self.reduces)
        return [
            n - more + more * devices / self.replicas
            for n, more in zip(self.reduces, growing, strict=True)
        ]

    def to_json(self) -> str:
        """All of it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Program:
        """What `to_json` wrote."""
        raw: dict[str, Any] = json.loads(text)
        for name in ("strategy", "reduces", "growing", "gathers"):
            raw[name] = tuple(raw[name])
        compiled = raw["compiled"]
        return cls(**{**raw, "compiled": None if compiled is None else Compiled(**compiled)})
