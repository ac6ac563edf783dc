"""Tables whose rows a worker looks up, and whose gradients it adds up, beside its compiled program.

For large lookups XLA's gather and scatter-add on CPU take longer than NumPy's `take`, and a product
with a sparse matrix of ones; and a program without arrays of pulled rows has one shape, however
many rows a batch needs. So the program gets what each lookup gets, and returns the gradients of
that; this says for which tables that is all there is to it. Where a step only sums what its lookups
get over ids, as over those of one feature, it gets the sums (`parameter_server/bags.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from stratagem.parameter_server.kernels import DTYPES
from stratagem.step.flatten import Equation
from stratagem.step.flow import Flow
from stratagem.step.program import variables_of
from stratagem.step.tables import ByRow

# Elements of all lookups of a table in a step, from where on it pays: each table costs some 90 us
# more, each element 1 to 2 ns less (two cores, a worker alone).
_LEAST = 1 << 16
_PASSES = ("mark", "copy", "copy_p", "stop_gradient")


class ByLookup:
    """Of a step's tables those that its compiled program needs no rows of.

    Args:
        flow: of the program.
        by_row: its tables.
        wanted: (value, table) of each value of rows that is pushed.
        refused: tables of which more is needed.

    Attributes:
        tables: their positions.
        looked_up: for each result of a gather, or of the sum over it, its table and row numbers.
        bags: for those of which sums are needed alone, over how many of their last dimensions.
        totals: for each of `wanted` that is of these tables what it is the sum of: gradients
            `[..., *row]`, and the row numbers that they are of.
        left: equations that the compiled program does without, by identity.
    """

    def __init__(
        self, flow: Flow, by_row: ByRow, wanted: Sequence[tuple[Any, int]], refused: set[int]
    ):
        self._flow, self._by_row = flow, by_row
        self._users: dict[Any, list[Equation]] = {}
        for eqn in flow.eqns:
            for v in variables_of(eqn.invars):
                self._users.setdefault(v, []).append(eqn)
        self.tables: set[int] = set()
        self.looked_up: dict[Any, tuple[int, Any]] = {}
        self.bags: dict[tuple[int, Any], int] = {}
        self.totals: dict[tuple[Any, int], list[tuple[Any, Any]]] = {}
        self.left: set[int] = set()
        for table in by_row.tables:
            if table not in refused:
                self._try(table, [v for v, t in wanted if t == table])

    def _try(self, table: int, wanted: Sequence[Any]) -> None:
        own = {v for v in self._by_row.values if self._by_row.table(v) == table}
        same = {self._flow.state[table]}
        found: dict[Any, tuple[int, Any]] = {}
        met: set[int] = set()
        explained: set[int] = set()
        for eqn in self._by_row.eqns:
            if own.isdisjoint([*variables_of(eqn.invars), *eqn.outvars]):
                continue
            met.add(id(eqn))
            if eqn.primitive.name in _PASSES and eqn.invars[0] in same:
                same.add(eqn.outvars[0])
                explained.add(id(eqn))
            elif eqn.primitive.name == "gather" and eqn.invars[0] in same and _in_order(eqn):
                found[eqn.outvars[0]] = table, eqn.invars[1]
                explained.add(id(eqn))
        totals = {(v, table): self._terms(v, own, explained) for v in wanted}
        size = sum(v.aval.size for v in found)
        if met == explained and all(totals.values()) and size >= _LEAST:
            self.tables.add(table)
            self.totals.update(totals)
            self.left |= met
            self._look_up(found)

    def _look_up(self, found: dict[Any, tuple[int, Any]]) -> None:
        """Notes what a table's lookups get: rows, or sums of all."""
        sums = {v: self._sum(v, ids.aval.ndim - 1) for v, (_, ids) in found.items()}
        bags = {(found[v], one[1]) for v, one in sums.items() if one is not None}
        if None in sums.values() or len(bags) > len(set(found.values())):
            self.looked_up.update(found)
            return
        self.bags.update(bags)
        for v, one in sums.items():
            if one is not None:
                self.looked_up[one[0]] = found[v]
                self.left.update(map(id, one[2]))

    def _sum(self, v: Any, lookup: int) -> tuple[Any, int, list[Equation]] | None:
        """The sum over the last dimensions of what a lookup got, if nothing else is made of it.

        Args:
            v: `[*lookup, *row]`.
            lookup: how many dimensions of a lookup it has.

        Returns:
            The sum, over how many dimensions, and the equations that make it.
        """
        eqns: list[Equation] = []
        while True:
            (eqn, *others) = self._users.get(v, [None])
            if eqn is None or others or v in self._flow.jaxpr.outvars:
                return None
            eqns.append(eqn)
            if eqn.primitive.name not in _PASSES:
                break
            v = eqn.outvars[0]
        if eqn.primitive.name != "reduce_sum" or v.aval.dtype.name not in DTYPES:
            return None
        axes = sorted(eqn.params["axes"])
        last = axes == list(range(lookup - len(axes), lookup))
        return (eqn.outvars[0], len(axes), eqns) if axes and last else None

    def _terms(self, value: Any, own: set[Any], explained: set[int]) -> list[tuple[Any, Any]]:
        """What a value is the sum of, and adds the equations that say so."""
        eqn = self._flow.producer.get(value)
        if eqn is None or value not in own:
            return []
        name = eqn.primitive.name
        if name == "scatter-add" and _adds_in_order(eqn, own):
            explained.add(id(eqn))
            return [(self._once(eqn), eqn.invars[1])]
        operands = variables_of(eqn.invars)
        sums = name in ("add", "add_any") and len(operands) == len(eqn.invars)
        if (sums or name in _PASSES) and own.issuperset(operands):
            explained.add(id(eqn))
            return [term for v in operands for term in self._terms(v, own, explained)]
        return []

    def _once(self, eqn: Equation) -> Any:
        """The gradients that a scatter-add adds; one for several row numbers that follow each
        other where it is the same for them, as after a sum over them."""
        updates: Any = eqn.invars[2]
        made = self._flow.producer.get(updates)
        if made is None or made.primitive.name != "broadcast_in_dim":
            return updates
        source: Any = made.invars[0]
        if isinstance(source, Literal):
            return updates
        lookup = eqn.invars[1].aval.ndim - 1
        row = updates.aval.ndim - lookup
        kept = source.aval.ndim - row
        dims = [*range(kept), *range(lookup, lookup + row)]
        fits = 0 <= kept < lookup and list(made.params["broadcast_dimensions"]) == dims
        same = [updates.aval.shape[d] for d in dims] == list(source.aval.shape)
        return source if fits and same else updates


def _in_order(gather: Equation) -> bool:
    """True where the result is `[*lookup, *row]`."""
    count = gather.invars[1].aval.ndim - 1
    dims = tuple(gather.params["dimension_numbers"].offset_dims)
    return dims == tuple(range(count, gather.outvars[0].aval.ndim))


def _adds_in_order(eqn: Equation, own: set[Any]) -> bool:
    """True for an addition of `[*lookup, *row]` to zeros."""
    if eqn.primitive.name != "scatter-add" or not own.isdisjoint(variables_of(eqn.invars)):
        return False
    if isinstance(eqn.invars[2], Literal) or eqn.outvars[0].aval.dtype.name not in DTYPES:
        return False
    count = eqn.invars[1].aval.ndim - 1
    dims = tuple(eqn.params["dimension_numbers"].update_window_dims)
    return dims == tuple(range(count, eqn.invars[2].aval.ndim))
