"""Policy FILE with several workers: each reads its own files, and all make one global batch."""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

from stratagem.data import blank
from stratagem.data.batch import Element
from stratagem.data.distributed_dataset import Feed, Step, log_first_step
from stratagem.data.exchange import Exchange
from stratagem.data.files import FileBatches
from stratagem.data.placement import Placement
from stratagem.data.policy import AutoShardPolicy
from stratagem.data.prefetch import Prefetch
from stratagem.data.shown import first_rows
from stratagem.data.spec import spec_of
from stratagem.data.split import RebatchRule, split_rows
from stratagem.data.split_feed import nothing_to_give_again, spec_of_worker
from stratagem.data.workers import Workers
from stratagem.errors import JobMismatchError


class Share(NamedTuple):
    """This worker's rows of a global batch.

    Args:
        rows: its own.
        per_worker: how many each worker has.
        state: where the pass is after it.
    """

    rows: Element
    per_worker: list[int]
    state: Any


class FileFeed:
    """A `Feed` of `from_files`: lane i belongs to worker `i mod workers`, with all its files.

    A worker's rows of a batch are split evenly among its replicas. The workers tell each other
    what their lanes have at hand in a thread that reads ahead.

    Args:
        files: the dataset.
        placement: the replicas.
        workers: who shares the files.
        note: what the log says of the policy.
        choose: makes the feed for other workers.
    """

    follows = False  # other workers' data is out of reach
    policy = AutoShardPolicy.FILE
    cardinality: int | float | None = None  # nobody knows all files

    def __init__(
        self,
        files: FileBatches,
        placement: Placement,
        workers: Workers,
        note: str,
        choose: Callable[[Placement, Workers], Feed],
    ):
        self._choose = choose
        self.files = files
        self.placement = placement
        self.workers = workers
        self.logged = False
        self._note = note

    @property
    def how(self) -> str:
        """In words, with the number of files of each worker."""
        count, lanes, workers = len(self.files.files), self.files.interleave, self.workers.count
        shares = [0] * workers
        for file in range(count):
            shares[file % lanes % workers] += 1
        return f"{self._note}each worker reads its own, {'+'.join(map(str, shares))} files"

    def steps(self) -> FileSteps:
        """Starts a pass."""
        number, self.files.passes = self.files.passes, self.files.passes + 1
        return FileSteps(self, {"pass": number})

    def shares(self, state: Any, exchange: Exchange | None) -> Iterator[Share]:
        """The batches of a pass from a state on, agreed with the other workers."""
        workers, own = self.workers, self._own()
        tell = (lambda mine: [mine]) if exchange is None else exchange.all_gather
        self._check_same_files(tell)

        def gather(found: dict[int, int]) -> list[int]:
            told = tell([found[i] for i in own])
            lanes = range(self.files.interleave)
            return [told[i % workers.count][i // workers.count] for i in lanes]

        def agree(seen: Element | None) -> Element:
            told = tell(seen and blank.to_json(seen, rows_alike=True))
            blank.check_alike(told)
            return blank.from_json(next(filter(None, told))) if seen is None else seen

        steps = self.files.steps(state, own, gather, agree)
        given = False
        while True:
            step = next(steps, None)
            if step is None:
                break
            given = True
            per_worker = [sum(step.counts[w :: workers.count]) for w in range(workers.count)]
            yield Share(step.rows, per_worker, step.state)
        if not given and "taken" not in state:
            raise self.files.as_source().empty()

    def _check_same_files(self, tell: Callable[[Any], list[Any]]) -> None:
        files = self.files
        names = [os.path.basename(path) for path in files.files]
        mine = f"{len(names)} files with CRC {zlib.crc32(repr(names).encode())}, {files.settings}"
        found = tell(mine)
        if len(set(found)) > 1:
            lines = [f"  worker {w}: {text}" for w, text in enumerate(found)]
            raise JobMismatchError(
                "Expected the same names of files and the same settings on every worker. Got\n"
                + "\n".join(lines)
                + f"\nThis one begins with {names[:3]}. List the same files in the same order."
            )

    def element_spec(self) -> Any:
        """From the first batch of this worker's files."""
        step = next(self.files.steps({"pass": self.files.passes}, self._own(), self._alone), None)
        if step is None:
            raise self.files.as_source().empty()
        leaves, treedef = step.rows
        spec = treedef.unflatten([spec_of(leaf, static_rows=False) for leaf in leaves])
        return spec_of_worker(spec, self.placement, split=True)

    def _own(self) -> range:
        """This worker's lanes."""
        return range(self.workers.index, self.files.interleave, self.workers.count)

    def _alone(self, found: dict[int, int]) -> list[int]:
        """What the lanes have when nobody else is asked."""
        return [found.get(i, 0) for i in range(self.files.interleave)]

    def redistribute(self, placement: Placement, workers: Workers) -> Feed:
        """The lanes go to the new workers, who read on where the old ones were."""
        return self._choose(placement, workers)


class FileSteps(Iterator[Step]):
    """One pass over the batches of a `FileFeed`."""

    def __init__(self, feed: FileFeed, state: Any):
        self._feed = feed
        self._state = self._before = state
        self._shares: Iterator[Share] | None = None
        self._said = False

    def __next__(self) -> Step:
        feed = self._feed
        if self._shares is None:
            self._shares = self._begin()
        share = next(self._shares)
        self._before, self._state = self._state, share.state
        each = len(feed.placement.local)
        counts = tuple(
            itertools.chain.from_iterable(
                split_rows(rows, each, RebatchRule.EVEN) for rows in share.per_worker
            )
        )
        leaves, treedef = share.rows
        element = treedef.unflatten([feed.placement.split_own(leaf, counts) for leaf in leaves])
        shown = () if self._said else first_rows(leaves[0])
        self._said = True
        if not feed.logged:
            log_first_step(feed, counts)
            feed.logged = True
        return Step(element, counts, shown)

    def _begin(self) -> Iterator[Share]:
        if self._feed.workers.count == 1:
            return self._feed.shares(self._state, None)
        exchange = self._feed.workers.exchange()
        return Prefetch(self._feed.shares(self._state, exchange), exchange)

    def get_state(self) -> Any:
        """The pass, its batches so far, and the rows taken from each lane of files."""
        # As `SplitFeed`, which takes its place where workers share rows.
        return self.position(again=False)

    def set_state(self, state: Any) -> None:
        """Goes on from a state. Rows before are read again and dropped."""
        self.close()
        self._shares = None
        self._state = self._before = state["iterator"]
        self._feed.files.passes = self._state["pass"] + 1

    def redistribute(self, again: bool) -> NoReturn:
        """Another feed takes this one's place."""
        raise NotImplementedError

    def position(self, again: bool) -> Any:
        """As `get_state`, or before the last step."""
        if again and self._before is self._state:
            raise nothing_to_give_again()
        state = self._before if again else self._state
        return {"drawn": state.get("step", 0), "iterator": state}

    def close(self) -> None:
        """Ends the thread that reads ahead."""
        if isinstance(self._shares, Prefetch):
            self._shares.close()
        self._shares = iter(())
