"""Splits global batches that every worker can produce: each takes the rows of its replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax

from stratagem.data.adapt import Source
from stratagem.data.anew import Dealt
from stratagem.data.batch import Element, check_structure, read_batch
from stratagem.data.distributed_dataset import Feed, Step, log_first_step
from stratagem.data.owned import owned
from stratagem.data.placement import Placement
from stratagem.data.policy import AutoShardPolicy, rebatch_rule
from stratagem.data.row_batches import Rows
from stratagem.data.shown import first_rows
from stratagem.data.spec import PerReplicaSpec, distribute_spec, spec_of
from stratagem.data.split import row_slices, split_rows
from stratagem.data.workers import Workers, fingerprint


class SplitFeed:
    """A `Feed` that deals the rows of each batch, by the rule of the dataset's shard policy.

    Every batch is dealt by itself, so no replica gets more than `ceil(rows / replicas)` rows.
    TF's OFF and FILE differ in a last, smaller batch: it fills the pattern of a full one in order.

    With several workers each one opens the source. Where that gives `Rows`, a worker reads its own
    rows only; else it reads all and keeps its own.
    """

    def __init__(
        self,
        source: Source,
        placement: Placement,
        workers: Workers,
        policy: AutoShardPolicy,
        note: str = "",
    ):
        self.policy = policy
        self.placement = placement
        self.workers = workers
        self.cardinality = source.cardinality
        self.source = source
        self.rule = rebatch_rule(policy)
        self.choose: Callable[[Placement, Workers], Feed] | None = None  # where others are possible
        self.logged = False
        self.how = f"{note}rows of each batch split by rule {self.rule.name}"
        if workers.count > 1 and source.open_rows is not None:
            self.how += ", each worker reads its own"
        elif workers.count > 1:
            self.how += ", each worker reads all and keeps its own"

    @property
    def follows(self) -> bool:
        """As `Feed`: every worker can produce every batch."""
        return self.choose is None

    def steps(self) -> SplitSteps:
        """Starts a pass; a one-shot source refuses a second one here."""
        return SplitSteps(self)

    def redistribute(self, placement: Placement, workers: Workers) -> Feed:
        """Every worker can produce every batch, so that nothing else changes."""
        if self.choose is not None:
            return self.choose(placement, workers)
        self.placement, self.workers = placement, workers
        return self

    def element_spec(self) -> Any:
        """From the dataset's own spec where it has one, else from its first batch."""
        spec = self.source.spec
        if spec is None:
            (leaves, treedef), _ = read_batch(self.source.first(), 0)
            static = self.source.static_rows
            spec = treedef.unflatten([spec_of(leaf, static_rows=static) for leaf in leaves])
        return spec_of_worker(spec, self.placement, split=True)


class SplitSteps(Iterator[Step]):
    """One pass over the batches of a `SplitFeed`."""

    def __init__(self, feed: SplitFeed):
        self._feed = feed
        self._open()

    def _open(self) -> None:
        source = self._feed.source
        self._batches = source.open() if source.open_rows is None else source.open_rows()
        self._structure: jax.tree_util.PyTreeDef | None = None
        self._drawn = 0
        self._last: Any = None
        self._before: Any = None
        self._again = False
        self._ended: Any = None  # where the pass was then

    def __next__(self) -> Step:
        batch = self._draw()
        count, read, identify = _rows(batch, self._drawn - 1)
        feed = self._feed
        counts = split_rows(count, feed.placement.num_replicas, feed.rule)
        local = feed.placement.local
        slices = row_slices(counts)
        if self._structure is None:
            feed.workers.check_same(identify)
        leaves, treedef = read(slice(slices[local[0]].start, slices[local[-1]].stop))
        parts = [feed.placement.split_own(leaf, counts) for leaf in leaves]
        if feed.workers.may_change:
            mesh = feed.placement.mesh
            parts = [
                Dealt(mesh, count, read, i, feed.rule).attach(part) for i, part in enumerate(parts)
            ]
        shown: tuple[Any, ...] = ()
        if self._structure is None:
            self._structure = treedef
            shown = first_rows(leaves[0])
            if not feed.logged:
                log_first_step(feed, counts)
                feed.logged = True
        check_structure(self._structure, treedef, self._drawn - 1)
        return Step(treedef.unflatten(parts), counts, shown)

    def _draw(self) -> Any:
        if self._again:
            self._again = False
            return self._last
        if self._ended is not None:
            raise StopIteration
        if self._feed.choose is not None:
            self._before = self.get_state()
        try:
            batch = next(self._batches)
            # A step may be dealt anew, after the batches that follow were drawn.
            self._last = owned(batch) if self._feed.workers.may_change else batch
        except StopIteration:
            self.close()
            if self._drawn == 0:
                raise self._feed.source.empty() from None
            raise
        self._drawn += 1
        return self._last

    def get_state(self) -> Any:
        """The batches drawn, and the source's own position where it has one."""
        if self._again:
            raise RuntimeError(
                "Expected the step that is given again to be taken before the position in the "
                "data is asked for. Call next(iterator) first."
            )
        if self._ended is not None:
            return self._ended
        get = getattr(self._batches, "get_state", None)
        return {"drawn": self._drawn, "iterator": None if get is None else get()}

    def set_state(self, state: Any) -> None:
        """Puts the source there, or reads and drops what comes before."""
        if self._drawn or self._ended is not None:
            self._open()
        if state["iterator"] is not None and hasattr(self._batches, "set_state"):
            self._batches.set_state(state["iterator"])
        else:
            for drawn in range(state["drawn"]):
                try:
                    next(self._batches)
                except StopIteration:
                    raise ValueError(
                        f"Expected a dataset of at least {state['drawn']} batches, of which that "
                        f"many were read before. Got {drawn}. Go on with the same data."
                    ) from None
        self._drawn = state["drawn"]

    def redistribute(self, again: bool) -> None:
        """The next batch is split among the feed's new replicas, and compared between them."""
        if again and self._drawn == 0:
            raise nothing_to_give_again()
        self._again = again
        self._structure = None

    def position(self, again: bool) -> Any:
        """As `get_state`, or before the last step."""
        if again and self._before is None:
            raise nothing_to_give_again()
        return self._before if again else self.get_state()

    def close(self) -> None:
        """Lets go of the source, whose iterator may have threads."""
        if self._ended is None:
            self._ended = self.get_state()
            if hasattr(self._batches, "close"):
                self._batches.close()
            self._batches = iter(())


def nothing_to_give_again() -> ValueError:
    """The error for a step that was not there."""
    return ValueError("Expected a step to give again. Got a pass that gave none so far.")


def _rows(batch: Any, index: int) -> tuple[int, Any, Any]:
    """How many rows a batch has, how to read some of them, and what identifies it."""
    if isinstance(batch, Rows):
        return batch.count, batch.read, batch.identify
    (leaves, treedef), rows = read_batch(batch, index)

    def read(part: slice) -> Element:
        if part.stop - part.start == rows:  # slicing a JAX array is work
            return Element(leaves, treedef)
        return Element([leaf[part] for leaf in leaves], treedef)

    return rows, read, lambda: fingerprint(leaves)


def spec_of_worker(spec: Any, placement: Placement, *, split: bool) -> Any:
    """The specs that the replicas of this worker see; with several workers the rows may differ."""
    spec = distribute_spec(spec, placement.num_replicas, split=split)
    local = len(placement.local)
    if local == placement.num_replicas:
        return spec

    def own(leaf: PerReplicaSpec) -> PerReplicaSpec:
        values = (spec_of(value, static_rows=False) for value in leaf.values[:local])
        return PerReplicaSpec(tuple(values))

    return jax.tree.map(own, spec)
