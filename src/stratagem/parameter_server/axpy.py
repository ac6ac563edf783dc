"""Updates that only add a multiple of what they are handed, such as SGD's: done in one pass.

Named after BLAS' `y <- a x + y`. As a row program such an update takes rows out, multiplies,
subtracts, and puts them back; this does the same arithmetic on the rows where they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from stratagem.parameter_server.kernels import DTYPES, add_multiples

if TYPE_CHECKING:
    from stratagem.parameter_server.block import Block
    from stratagem.parameter_server.rows import Operand, RowProgram


@dataclasses.dataclass(frozen=True)
class Axpy:
    """`member += sign * scale * rows`, the operands numbered as in the program.

    Attributes:
        member: which array of the unit changes; the others are there to be read.
        rows: a handed value.
        scale: a handed value or a number; None: 1.
        sign: 1 or -1.
    """

    member: int
    rows: int
    scale: Operand | None
    sign: int

    @classmethod
    def of(cls, program: RowProgram) -> Axpy | None:
        """What a program does, if it is that."""
        changed = [(i, out) for i, out in enumerate(program.outputs) if out is not None]
        last = program.members + len(program.handed) + len(program.steps) - 1
        if len(changed) != 1 or not program.steps or changed[0][1] != last:
            return None
        member, step = changed[0][0], program.steps[-1]
        if step.name not in ("sub", "add", "add_any"):
            return None
        orders = [step.operands] if step.name == "sub" else [step.operands, step.operands[::-1]]
        for old, more in orders:
            found = _multiple(program, more)
            if old == member and found is not None:
                return cls(member, *found, -1 if step.name == "sub" else 1)
        return None

    def run(self, blocks: Sequence[Block], rows: np.ndarray, handed: Sequence[np.ndarray]) -> bool:
        """Changes rows of the member.

        Args:
            blocks: of the unit's variables.
            rows: int64 numbers in the block, that were checked.
            handed: as the program says, with shapes that were checked.

        Returns:
            False where it has done nothing, as it does not do these dtypes.
        """
        block, added = blocks[self.member], handed[self.rows - len(blocks)]
        dtype = block.array.dtype
        if self.scale is None:
            scale = dtype.type(1)
        elif isinstance(self.scale, int):
            scale = handed[self.scale - len(blocks)][()]
        else:
            scale = self.scale.scalar
        if dtype.name not in DTYPES or not dtype == added.dtype == scale.dtype:
            return False
        block.changed()
        add_multiples(block.array, rows, self.sign * scale, added)
        return True


def _multiple(program: RowProgram, operand: Operand) -> tuple[int, Operand | None] | None:
    """Of which handed rows a value is a multiple, and of how much."""
    if isinstance(operand, int) and _kind(program, operand) == "rows":
        return operand, None
    result = operand - program.members - len(program.handed) if isinstance(operand, int) else -1
    step = program.steps[result] if result >= 0 else None
    if step is None or step.name != "mul":
        return None
    for rows, scale in (step.operands, step.operands[::-1]):
        if isinstance(rows, int) and _kind(program, rows) == "rows":
            if _kind(program, scale) == "scalar":
                return rows, scale
    return None


def _kind(program: RowProgram, operand: Operand) -> str | None:
    """Of a handed value or a number; None of what is neither."""
    if not isinstance(operand, int):
        return "scalar"
    number = operand - program.members
    return program.handed[number] if 0 <= number < len(program.handed) else None
