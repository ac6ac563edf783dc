"""Updates that are not elementwise: programs of `jax.export`, compiled where they first run.

A server that is sent none imports no JAX.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from stratagem.parameter_server.rows import RowProgram

WHOLE = "whole"


@dataclasses.dataclass(frozen=True)
class WholeProgram:
    """How a unit's arrays change as a whole (a norm of a weight, say). Never of a shard.

    Attributes:
        members: arrays of the unit.
        handed: kind of each value that comes from outside: "whole".
        written: for each member, whether the program gives it a new value.
        program: serialised; `(*state, *handed) -> new values of the written members`.
    """

    members: int
    handed: tuple[str, ...]
    written: tuple[bool, ...]
    program: bytes

    def run(self, state: Sequence[np.ndarray], handed: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The members' new values, as new arrays; a member that is only read is returned as it is.

        Raises:
            ValueError: arrays of other shapes or numbers than the program's.
        """
        new = iter(self._function(*state, *handed))
        return [
            np.array(next(new)) if writes else old
            for old, writes in zip(state, self.written, strict=True)
        ]

    def update(self, state: Sequence[np.ndarray], handed: Sequence[np.ndarray]) -> None:
        """Changes the members in place."""
        for member, value in zip(state, self.run(state, handed), strict=True):
            if value is not member:
                np.copyto(member, value)

    @functools.cached_property
    def _function(self) -> Any:
        import jax
        from jax import export

        return jax.jit(export.deserialize(bytearray(self.program)).call)

    def to_wire(self) -> dict[str, Any]:
        """The program as plain data."""
        return {
            "kind": WHOLE,
            "handed": len(self.handed),
            "written": list(self.written),
            "program": self.program,
        }

    @classmethod
    def from_wire(cls, data: Any) -> WholeProgram:
        """The program of plain data that another process sent.

        Raises:
            ValueError: it is no program.
        """
        names = {"kind", "handed", "written", "program"}
        if not isinstance(data, dict) or set(data) != names or data["kind"] != WHOLE:
            raise _refused(f"{data!r:.100}")
        count, written, program = data["handed"], data["written"], data["program"]
        if type(count) is not int or not 0 <= count <= _MOST:
            raise _refused(f"{count!r} handed values")
        if not isinstance(written, (list, tuple)) or not 0 < len(written) <= _MOST:
            raise _refused(f"members {written!r:.100}")
        if any(type(w) is not bool for w in written) or not isinstance(program, bytes):
            raise _refused("fields of other types")
        return cls(len(written), (WHOLE,) * count, tuple(written), program)


_MOST = 10_000


def program_of(data: Any) -> RowProgram | WholeProgram:
    """The update of a unit, of plain data that another process sent.

    Raises:
        ValueError: it is none.
    """
    if isinstance(data, dict) and data.get("kind") == WHOLE:
        return WholeProgram.from_wire(data)
    return RowProgram.from_wire(data)


def _refused(got: str) -> ValueError:
    return ValueError(
        f"Expected an update of a unit. Got {got}. Use the same version of Stratagem in all tasks."
    )
