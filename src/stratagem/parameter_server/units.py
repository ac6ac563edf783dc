"""The updates that a server can make, and which changes fit them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stratagem.parameter_server import checks
from stratagem.parameter_server.bags import Bagged
from stratagem.parameter_server.block import Block
from stratagem.parameter_server.dtypes import dtype_of
from stratagem.parameter_server.plan import Spec, Unit
from stratagem.parameter_server.rounds import Change
from stratagem.parameter_server.rows import RowProgram
from stratagem.parameter_server.whole import WholeProgram, program_of

Specs = Mapping[int, Spec]


class Units:
    """Units with their programs.

    Attributes:
        units: by their names.
    """

    def __init__(self) -> None:
        self.units: dict[int | str, Unit] = {}
        self._programs: dict[int | str, RowProgram | WholeProgram] = {}
        self._tried: set[Any] = set()

    def install(self, units: Sequence[Unit], specs: Specs) -> None:
        """Adds units, or none; see `Store.install`."""
        programs: dict[int | str, RowProgram | WholeProgram] = {}
        new: dict[int | str, Unit] = {}
        for unit in units:
            here = self.units.get(unit.uid) or new.get(unit.uid)
            if here is not None and here != unit:
                raise ValueError(
                    f"unit {unit.uid}: expected the one that is installed, of variables "
                    f"{here.vids}. Got another one, of {unit.vids}. Give it another number."
                )
            if here is None:
                programs[unit.uid], new[unit.uid] = _program(unit, specs), unit
        self.units.update(new)
        self._programs.update(programs)

    def remove(self, vids: set[int]) -> None:
        """Removes units that have any of these variables."""
        self.units = {uid: u for uid, u in self.units.items() if not vids & set(u.vids)}
        self._programs = {uid: self._programs[uid] for uid in self.units}
        self._tried = {key for key in self._tried if key[0] in self.units}

    def unit(self, uid: int | str) -> Unit:
        """The unit of a name; raises ValueError where there is none."""
        unit = self.units.get(uid)
        if unit is None:
            raise ValueError(
                f"Expected a unit that is installed. Got {uid!r}. Install it before the push."
            )
        return unit

    def program(self, uid: int | str) -> RowProgram | WholeProgram:
        """The update of a unit."""
        return self._programs[uid]

    def check(self, change: Change, block: Block, specs: Specs) -> None:
        """Raises ValueError for a change that its unit cannot make.

        Args:
            change: of a unit that is here.
            block: the rows of the unit's first variable.
            specs: of all variables.
        """
        program = self._programs[change.uid]
        kinds = tuple(kind for kind, _ in change.handed)
        if isinstance(program, WholeProgram):
            if change.rows is not None:
                raise ValueError(
                    f"unit {change.uid}: expected no row numbers, as its update needs all rows. "
                    f"Got {len(change.rows)}. Push it whole."
                )
            return
        if kinds != program.handed:
            raise ValueError(
                f"unit {change.uid}: expected values of the kinds {program.handed}. Got {kinds}. "
                "Push what its program takes."
            )
        shape = block.array.shape
        if change.rows is not None:
            checks.sorted_rows(block, change.rows)
            shape = (len(change.rows), *shape[1:])
        for kind, value in change.handed:
            if value.shape != (shape if kind == "rows" else ()):
                raise ValueError(
                    f"unit {change.uid}: expected values of shape {shape}, and scalars of (). Got "
                    f"{value.shape} as {kind!r}. Push one value a row."
                )
        self._try(change, program, specs)

    def by_row(
        self, uid: int | str, rows: np.ndarray, gradients: Bagged, specs: Specs
    ) -> np.ndarray:  # fmt: skip
        """Sums of gradients of bags, one for each of some rows of a unit.

        Raises:
            ValueError: it is not here, or they are of other rows.
        """
        spec = specs[self.unit(uid).vids[0]]
        got, bags = gradients.gradients, gradients.bags
        checks.bags(spec, bags, len(rows))
        if (got.dtype.name, *got.shape) != (spec.dtype, len(bags), *spec.shape[1:]):
            raise ValueError(
                f"unit {uid}: expected gradients {spec.dtype}{[len(bags), *spec.shape[1:]]} of "
                f"{len(bags)} bags. Got {got.dtype}{list(got.shape)}. Push one for each bag."
            )
        return gradients.by_row(len(rows))

    def _try(self, change: Change, program: RowProgram, specs: Specs) -> None:
        """Runs the program on a row of zeros, once for each combination of dtypes."""
        key = (change.uid, tuple(value.dtype for _, value in change.handed))
        if key in self._tried:
            return
        members = [specs[vid] for vid in self.units[change.uid].vids]
        one = (1, *members[0].shape[1:]) if members[0].shape else ()
        state = [np.zeros(one, dtype_of(spec.dtype)) for spec in members]
        handed = [
            np.zeros(one if kind == "rows" else (), value.dtype) for kind, value in change.handed
        ]
        try:
            program.update(state, handed)
        # Whatever it is, this push is refused before it changes anything.
        except Exception as e:
            raise ValueError(
                f"unit {change.uid}: expected values that its program can use. Got "
                f"{[str(value.dtype) for _, value in change.handed]}: {type(e).__name__}: {e}. "
                "Push what it was built for."
            ) from e
        self._tried.add(key)


def _program(unit: Unit, specs: Specs) -> RowProgram | WholeProgram:
    """The update of a unit whose variables fit it."""
    found = [specs[vid] for vid in unit.vids if vid in specs]
    if len(found) < len(unit.vids) or len(set(unit.vids)) < len(unit.vids):
        raise ValueError(
            f"unit {unit.uid}: expected variables that exist, each once. Got {unit.vids}. Create "
            "them first."
        )
    program = program_of(unit.program)
    if isinstance(program, WholeProgram):
        if any(
            spec.sharded or spec.shards[0].server != found[0].shards[0].server for spec in found
        ):
            raise ValueError(
                f"unit {unit.uid}: expected variables that are whole and on one server, as the "
                f"update needs all rows. Got {found}. Place them so."
            )
    elif any(s.shape != found[0].shape or s.shards != found[0].shards for s in found):
        raise ValueError(
            f"unit {unit.uid}: expected variables of one shape and with the same shards. Got "
            f"{found}. Place slots beside their variable."
        )
    if program.members != len(found):
        raise ValueError(
            f"unit {unit.uid}: expected a program of {len(found)} arrays. Got one of "
            f"{program.members}. Build it for these variables."
        )
    return program
