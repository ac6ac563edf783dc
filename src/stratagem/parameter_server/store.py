"""What one parameter server keeps: shards of variables, how they change, and what was applied.

For one thread. Arguments are checked before anything changes: who gets an error from a method
knows that the state is as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from stratagem.parameter_server import checks, initial, memory
from stratagem.parameter_server.applied import Applied, Tokens
from stratagem.parameter_server.bags import Bags
from stratagem.parameter_server.block import Block, assign, check_operation, update
from stratagem.parameter_server.dtypes import dtype_of
from stratagem.parameter_server.plan import Spec, Unit
from stratagem.parameter_server.rounds import Change, Committed, Numbers, Pushed, Rounds
from stratagem.parameter_server.tables import Tables
from stratagem.parameter_server.units import Units
from stratagem.parameter_server.whole import WholeProgram

# Whole variables up to this size keep the copy that was made to send them.
_KEPT_COPY = 1 << 20
Rows = np.ndarray | slice
Token = tuple[str, int, int]


class Store:
    """The content of one ps task.

    Args:
        server: which one it is.
        memory_limit: bytes that variables and staged gradients may take; None: what this machine
            can give.

    Attributes:
        updates: units with their programs.
        version: how many pushes and commits were applied.
        before_write: called with a variable, a shard and local rows before they change.
        elsewhere: says what else counts towards the limit.
    """

    def __init__(self, server: int, memory_limit: int | None = None):
        self.server = server
        self.memory_limit = memory.available() if memory_limit is None else memory_limit
        self.elsewhere: Callable[[], int] = lambda: 0
        self.clear()

    def clear(self) -> None:
        """Forgets everything."""
        self.version = 0
        self.specs: dict[int, Spec] = {}
        self.blocks: dict[tuple[int, int], Block] = {}
        self.updates, self.tables = Units(), Tables()
        self.applied, self.tokens, self.rounds = Applied(), Tokens(), Rounds()
        self.before_write: Callable[[int, int, Rows], None] | None = None

    @property
    def units(self) -> Mapping[int | str, Unit]:
        """Those that are installed."""
        return self.updates.units

    @property
    def nbytes(self) -> int:
        """Size of the variables' shards that are here."""
        return sum(block.array.nbytes for block in self.blocks.values()) + self.tables.nbytes

    def create(self, specs: Sequence[Spec], starts: Mapping[int, Mapping[str, Any]]) -> None:
        """Creates variables that are not here yet; those that are keep their values.

        Args:
            specs: of the whole variables; only the shards of this server are made.
            starts: by variable, how it starts (`initial.py`), or {"kind": "value", "arrays":
                values by shard}.

        Raises:
            ValueError: one is here with another description; a start is missing or wrong.
            MemoryError: they do not fit under the limit.
        """
        for _ in self.creating(specs, starts):
            pass

    def creating(
        self, specs: Sequence[Spec], starts: Mapping[int, Mapping[str, Any]]
    ) -> Generator[None, None, None]:
        """As `create`, in steps of about a millisecond; all are there after the last one."""
        new = self.check_new(specs)
        for spec in new:
            checks.start(spec, spec.held_by(self.server), starts.get(spec.vid))
        made: dict[tuple[int, int], np.ndarray] = {}
        for spec in new:
            for i in spec.blocks_on(self.server):
                array = made[spec.vid, i] = np.empty(spec.shard_shape(i), dtype_of(spec.dtype))
                start, first = starts[spec.vid], spec.shards[i].start
                if start["kind"] == "value":
                    array[...] = start["arrays"][i]
                    yield
                else:
                    yield from initial.fill(start, array, spec.shape[1:], first, spec.rows)
        self.keep(self.check_new(new), made)  # another request may have made them meanwhile

    def check_new(self, specs: Sequence[Spec]) -> list[Spec]:
        """Those that are not here yet.

        Raises:
            ValueError: one is here with another description.
            MemoryError: they do not fit under the limit.
        """
        new: dict[int, Spec] = {}
        for spec in specs:
            here = self.specs.get(spec.vid) or new.get(spec.vid)
            if here is not None and here != spec:
                raise ValueError(
                    f"variable {spec.vid}: expected {here}, which exists. Got {spec}. Delete it "
                    "first, or give the new one another number."
                )
            if here is None:
                new[spec.vid] = spec
        self._check_memory(
            sum(
                math.prod(spec.shard_shape(i)) * dtype_of(spec.dtype).itemsize
                for spec in new.values()
                for i in spec.blocks_on(self.server)
            ),
            f"{len(new)} variables, the first of them {next(iter(new.values())).name!r}"
            if new
            else "nothing",
        )
        return list(new.values())

    def keep(self, specs: Sequence[Spec], arrays: Mapping[tuple[int, int], np.ndarray]) -> None:
        """Takes variables over with their arrays, which nobody else may change then."""
        for spec in specs:
            self.tables.add(spec)
            for i in spec.blocks_on(self.server):
                self.blocks[spec.vid, i] = Block(arrays[spec.vid, i], spec.shards[i].start)
        self.specs.update((spec.vid, spec) for spec in specs)

    def install(self, units: Sequence[Unit]) -> None:
        """Adds units; those that are here and equal stay.

        Raises:
            ValueError: another unit has its number; its variables are not here, or differ in
                shape or shards; its program is none.
        """
        self.updates.install(units, self.specs)

    def delete(self, vids: Iterable[int]) -> None:
        """Removes variables, and the units that have any of them; unknown ones are no error."""
        gone = set(vids)
        self.specs = {vid: spec for vid, spec in self.specs.items() if vid not in gone}
        self.blocks = {key: block for key, block in self.blocks.items() if key[0] not in gone}
        self.updates.remove(gone)
        self.tables.remove(gone)

    # Values

    def pull(
        self, whole: Sequence[tuple[int, int]], rows: Sequence[tuple[int, int, np.ndarray]],
        allocate: Callable[[tuple[int, ...], Any], np.ndarray] = np.empty,
        rooms: Sequence[int] = (), bags: Sequence[Bags | None] = (),
    ) -> list[np.ndarray]:  # fmt: skip
        """Copies of whole shards, then rows or sums of them.

        Args:
            whole: variable and shard of each.
            rows: variable, shard, and row numbers in the variable: int64, sorted, none twice.
            allocate: makes the arrays for rows, of a shape and a dtype.
            rooms: how long the arrays of rows are, with zeros at the end; not of dynamic tables.
            bags: of the rows of each, whose sums are wanted; None: the rows are.

        Raises ValueError for one that is not here, or cannot be added up.
        """
        rooms, bags = rooms or [len(ids) for _, _, ids in rows], bags or [None] * len(rows)
        every = zip(rows, rooms, bags, strict=True)
        plan = [(v, self._rows_of(v, i), n, room, own) for (v, i, n), room, own in every]
        for vid, block, ids, room, own in plan:
            checks.sorted_rows(block, ids)
            checks.room(self.specs[vid], ids, room)
            if own is not None:
                checks.bags(self.specs[vid], own, len(ids))
        found = [self.block(vid, i).whole(_KEPT_COPY) for vid, i in whole]
        for vid, block, ids, room, own in plan:
            if vid in self.tables:
                found.append(self.tables.pull(vid, ids))
                continue
            count = room if own is None else len(own)
            out = allocate((count, *block.array.shape[1:]), block.array.dtype)
            here = checks.local(block, ids)
            found.append(block.take(here, out) if own is None else own.sums(block.array, out, here))
        return found

    def read(self, vid: int, shard: int, start: int, stop: int) -> np.ndarray:
        """A copy of consecutive rows, by their numbers in the whole variable."""
        block = self.block(vid, shard)
        checks.row_range(block, start, stop)
        if not block.array.ndim:
            return block.array.copy()
        return block.array[start - block.start : stop - block.start].copy()

    def assign(
        self, vid: int, shard: int, op: str, value: np.ndarray,
        rows: np.ndarray | tuple[int, int] | None = None, token: Token | None = None,
    ) -> bool:  # fmt: skip
        """Changes values by an operation.

        Args:
            vid: the variable.
            shard: the shard.
            op: "set", "add", "sub", "mul", "div", "min" or "max".
            value: of the dtype, `[rows, ...]`.
            rows: which: a range or int64 numbers, in the whole variable; None: all of the shard.
                A number may occur several times: operations add up, the last "set" wins.
            token: client, number and lowest number without an answer; None: not known.

        Returns:
            Whether it was done; not if the token was used before.

        Raises:
            ValueError: any of these is wrong.
        """
        block = self.block(vid, shard)
        check_operation(op, block.array.dtype, isinstance(rows, np.ndarray))
        if isinstance(rows, np.ndarray):
            checks.row_numbers(block, rows)
            shape: tuple[int, ...] = (len(rows), *block.array.shape[1:])
        elif rows is not None:
            checks.row_range(block, *rows)
            shape = (rows[1] - rows[0], *block.array.shape[1:])[: block.array.ndim]
        else:
            shape = block.array.shape
        if value.shape != shape or value.dtype != block.array.dtype:
            raise ValueError(
                f"variable {self.specs[vid].name!r}: expected {block.array.dtype}{list(shape)}. "
                f"Got {value.dtype}{list(value.shape)}. Send values of the rows that are named."
            )
        if token is not None and not self.tokens.take(*token):
            return False
        self._assign(vid, shard, block, op, value, rows)
        return True

    def push(
        self, closure: int, below: int, changes: Sequence[Change], pulled: int | None = None,
        number: int | None = None, staged: Iterable[int | str] | None = None, weight: float = 1.0,
    ) -> Pushed:  # fmt: skip
        """Applies a closure's changes, unless they were; or keeps them for their round.

        Args:
            closure: its number in the job.
            below: all closures below this number are finished.
            changes: what it changes here.
            pulled: the version at which it pulled.
            number: of the round that it belongs to; None: all is applied at once.
            staged: units that wait for the commit of the round; None: all of them. Changes of
                the others are applied at once.
            weight: of its gradients in the round.

        Raises:
            ValueError: a change does not fit its unit.
            MemoryError: too much waits for commits.
        """
        if below > closure:
            raise ValueError(
                f"Expected a closure that may be at work, {below} or above. Got {closure}. Send "
                "`below` as it was when the closure was handed out."
            )
        for change in changes:
            self.check(change)
        staleness = 0 if pulled is None else max(0, self.version - pulled)
        wait = set(staged) if staged is not None else {change.uid for change in changes}
        later = [c for c in changes if c.uid in wait] if number is not None else []
        now = [c for c in changes if number is None or c.uid not in wait]
        self._check_memory(sum(c.nbytes for c in later), "gradients of a round")
        done = False
        if now or number is None:
            if closure not in self.applied:
                self.applied.check_room()
                self._apply(now)
                self.applied.add(closure)
                done = True
        self.applied.advance(below)
        late = False
        if number is not None:
            done = self.rounds.stage(number, closure, weight, later) or done
            late = number <= self.rounds.committed
        return Pushed(done, staleness, late)

    def commit(
        self, number: int, closures: Sequence[int], weights: Sequence[float] | None = None,
        mean: bool = True, numbers: Numbers = None,
    ) -> Committed:  # fmt: skip
        """Applies what exactly these closures staged for a round, as one push.

        What others staged for this round or one before it is dropped. A round that was committed
        is left alone.

        Args:
            number: of the round.
            closures: in the order in which they are added; no number twice.
            weights: of each; None: those that came with the pushes.
            mean: divides by the sum of the weights.
            numbers: of the round, in place of what was pushed.
        """
        if number <= self.rounds.committed:
            return Committed(False)
        if missing := self.rounds.missing(number, closures):
            return Committed(False, missing)
        changes = self.rounds.combined(number, closures, weights, mean, numbers) if closures else []
        self._apply(changes)
        return Committed(True, (), self.rounds.finish(number, closures))

    def check(self, change: Change) -> None:
        """Raises ValueError for a change that its unit cannot make."""
        unit = self.updates.unit(change.uid)
        self.updates.check(change, self._rows_of(unit.vids[0], change.shard), self.specs)

    def status(self) -> dict[str, Any]:
        """Numbers for people and for the coordinator."""
        return {
            "version": self.version, "variables": len(self.specs), "units": len(self.units),
            "bytes": self.nbytes, "memory_limit": self.memory_limit, "tables": self.tables.status(),
            "staged_bytes": self.rounds.nbytes, "committed": self.rounds.committed,
            "late": self.rounds.late, "dropped": self.rounds.dropped,
            "below": self.applied.below, "above": len(self.applied),
        }  # fmt: skip

    def _rows_of(self, vid: int, shard: int) -> Block:
        """What to check row numbers, or ids, of a variable with."""
        return self.tables.bounds(vid) if vid in self.tables else self.block(vid, shard)

    def block(self, vid: int, shard: int) -> Block:
        """A shard's rows; raises ValueError where it is not here."""
        if (block := self.blocks.get((vid, shard))) is not None:
            return block
        raise ValueError(
            f"Expected a shard that is on ps {self.server}. Got shard {shard} of variable {vid}. "
            "Create it here, or ask the server that has it."
        )

    # Inside

    def _apply(self, changes: Sequence[Change]) -> None:
        """Applies changes that were checked, and counts them as one push."""
        results: list[tuple[int, int, np.ndarray]] = []
        by_row = []
        for change in changes:
            unit, program = self.units[change.uid], self.updates.program(change.uid)
            if not isinstance(program, WholeProgram):
                by_row.append((change, unit, program))
                continue
            blocks = [self.block(vid, change.shard) for vid in unit.vids]
            old = [block.array for block in blocks]
            new = program.run(old, [value for _, value in change.handed])
            for vid, before, after in zip(unit.vids, old, new, strict=True):
                checks.same_kind(unit.uid, before, after)
                if after is not before:
                    results.append((vid, change.shard, after))
        for change, unit, _ in by_row:
            if unit.vids[0] in self.tables:
                self.tables.admit(unit.vids[0], change.rows, self.version)
        # Nothing may fail from here on.
        for change, unit, program in by_row:
            if change.rows is not None and unit.vids[0] in self.tables:
                values = [value for _, value in change.handed]
                self.tables.update(program, unit.vids, change.rows, values, self.version)
                continue
            blocks = [self.block(vid, change.shard) for vid in unit.vids]
            rows = None if change.rows is None else checks.local(blocks[0], change.rows)
            for vid in unit.vids:
                self._announce(vid, change.shard, rows)
            update(program, blocks, rows, [value for _, value in change.handed])
        for vid, shard, array in results:
            self._announce(vid, shard, None)
            self.block(vid, shard).write(0, array)
        self.version += 1
        self.tables.tick(self.version)

    def _announce(self, vid: int, shard: int, rows: Rows | None) -> None:
        if self.before_write is not None:
            self.before_write(vid, shard, slice(None) if rows is None else rows)

    def _assign(
        self, vid: int, shard: int, block: Block, op: str, value: np.ndarray,
        rows: np.ndarray | tuple[int, int] | None,
    ) -> None:  # fmt: skip
        where: Any = ...
        if isinstance(rows, np.ndarray):
            where = checks.local(block, rows)
        elif rows is not None and block.array.ndim:
            where = slice(rows[0] - block.start, rows[1] - block.start)
        self._announce(vid, shard, None if where is ... else where)
        assign(block, op, where, value)

    def _check_memory(self, more: int, what: str) -> None:
        there = self.nbytes + self.rounds.nbytes + self.elsewhere()
        memory.check(self.server, self.memory_limit, there, more, what)
