"""A batch that was dealt remembers how to be dealt to other replicas: a step is done again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from stratagem.data.batch import Element
from stratagem.data.placement import Placement
from stratagem.data.split import RebatchRule, row_slices, split_rows
from stratagem.values import PerReplica


class Dealt:
    """One leaf of a global batch that every process can read.

    Args:
        mesh: the replicas that it was dealt to.
        rows: of the global batch.
        read: reads some rows of all leaves.
        leaf: which one.
        rule: how rows are shared.
    """

    def __init__(
        self, mesh: Mesh, rows: int, read: Callable[[slice], Element], leaf: int, rule: RebatchRule
    ):
        self.mesh = mesh
        self._rows, self._read, self._leaf, self._rule = rows, read, leaf, rule

    def attach(self, part: Any) -> PerReplica:
        """The value that remembers this; a PerReplica also for one replica."""
        shapes = [tuple(part.shape)] if not isinstance(part, PerReplica) else None
        value = part if shapes is None else PerReplica([part], shapes)
        value.dealt = self
        return value

    def counts(self, replicas: int) -> tuple[int, ...]:
        """Rows that each of so many replicas would get."""
        return split_rows(self._rows, replicas, self._rule)

    def anew(self, mesh: Mesh) -> PerReplica:
        """The value for other replicas: the same rows, other shares. Asks no other process."""
        placement = Placement(mesh)
        counts = self.counts(placement.num_replicas)
        slices, local = row_slices(counts), placement.local
        leaves, _ = self._read(slice(slices[local[0]].start, slices[local[-1]].stop))
        part = placement.split_own(leaves[self._leaf], counts)
        return Dealt(mesh, self._rows, self._read, self._leaf, self._rule).attach(part)
