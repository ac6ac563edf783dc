"""Deals whole elements of a worker's own source to its replicas; all workers step together."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import jax

from stratagem.data import blank
from stratagem.data.adapt import Source
from stratagem.data.batch import Element, check_structure, read_element
from stratagem.data.distributed_dataset import Step, log_first_step
from stratagem.data.exchange import Exchange
from stratagem.data.owned import owned_array
from stratagem.data.placement import Placement
from stratagem.data.policy import AutoShardPolicy
from stratagem.data.prefetch import Prefetch
from stratagem.data.shown import first_rows
from stratagem.data.spec import spec_of
from stratagem.data.split_feed import spec_of_worker
from stratagem.data.workers import Workers

logger = logging.getLogger("stratagem")

# Where a dataset's iteration runs; a function, since such a context is entered anew each time.
Where = Callable[[], contextlib.AbstractContextManager[Any]]

Shapes = list[list[int]]  # of the leaves of one replica's element


class Hand(NamedTuple):
    """What the replicas get in one step.

    Args:
        parts: an element for each replica of this worker.
        shapes: for each replica of the job, the shapes of its leaves.
    """

    parts: list[Element]
    shapes: list[Shapes]


class DealFeed:
    """A `Feed` that gives element i of a source to one replica, whole.

    With one source, element i goes to replica `i mod replicas` of this worker; with one source a
    replica, each reads its own. When some replicas of the job have an element and others do not,
    those get one with zero rows, until all sources have ended. Where that is impossible (no row
    axis; on one worker also static shapes) the step is dropped, as in TF, with a warning.

    Several workers tell each other the shapes of each step, in a thread that reads ahead.

    Args:
        sources: of this worker.
        placement: the replicas.
        workers: who shares the training.
        places: where to iterate each source.
    """

    follows = False  # other workers' data is out of reach
    policy = AutoShardPolicy.OFF  # who made the sources has shared the data out already

    def __init__(
        self,
        sources: list[Source],
        placement: Placement,
        workers: Workers,
        places: list[Where] | None = None,
        how: str = "every worker reads its own dataset in full",
    ):
        self.placement = placement
        self.workers = workers
        self.how = how
        self.static = workers.count == 1 and all(source.static_rows for source in sources)
        self.logged = False
        self._sources = sources
        self._places = [contextlib.nullcontext] * len(sources) if places is None else places
        self._local = len(placement.local)
        self.cardinality = self._cardinality()

    def _cardinality(self) -> int | float | None:
        lengths = [source.cardinality for source in self._sources]
        if self.workers.count > 1:  # the others' are not known
            return math.inf if lengths == [math.inf] * len(lengths) else None
        if len(self._sources) == 1:
            lengths = [n and n / self._local for n in lengths]
        known = [n for n in lengths if n is not None]
        if len(known) < len(lengths):
            return None
        full = min(known) if min(known) == math.inf else math.floor(min(known))
        some = max(known) if max(known) == math.inf else math.ceil(max(known))
        if full == some or self.static:
            return full
        # Whether the last steps can be padded is known before the first element only by a spec.
        specs = [jax.tree.leaves(source.spec) for source in self._sources]
        return some if all(s and all(leaf.shape for leaf in s) for s in specs) else None

    def steps(self) -> DealSteps:
        """Starts a pass; a one-shot source refuses a second one here."""
        return DealSteps(self)

    def open(self) -> Iterator[list[Element | None]]:
        """Starts a pass: an element for each replica of this worker, None past the end."""
        passes = []
        for source, where in zip(self._sources, self._places, strict=True):
            with where():
                passes.append(source.open())
        return self._read(passes)

    def _read(self, passes: list[Iterator[Any]]) -> Iterator[list[Element | None]]:
        times = self._local if len(passes) == 1 else 1
        # A hand has several elements, and where there are other workers several hands wait.
        keep = self._local > 1 or self.workers.count > 1
        readers = list(zip(passes * times, self._places * times, strict=True))
        structure = None
        index = 0
        while True:
            parts: list[Element | None] = []
            for reader, where in readers:
                with where():
                    parts.append(_next(reader, index, keep))
                part = parts[-1]
                if part is not None:
                    structure = part.treedef if structure is None else structure
                    check_structure(structure, part.treedef, index)
                    index += 1
            yield parts

    def agree(
        self, hands: Iterator[list[Element | None]], exchange: Exchange | None
    ) -> Iterator[Hand]:
        """Fills up what has no element, until no replica of the job has one."""
        like: Element | None = None  # the first of this worker, or what others have
        told: list[Any] = [None] * self.workers.count  # what each worker's elements are like
        while True:
            parts = next(hands)
            news = next(filter(None, parts), None) if told[self.workers.index] is None else None
            shapes = self._tell(parts, news, told, exchange)
            filler = next(filter(None, shapes), None)
            if filler is None:
                return
            if None in shapes and (self.static or not all(filler)):
                self._warn_dropped(len(shapes) - shapes.count(None))
                return
            if like is None:
                like = blank.from_json(next(filter(None, told))) if news is None else news
            yield _filled(parts, shapes, filler, like)

    def _tell(
        self,
        parts: list[Element | None],
        news: Element | None,
        told: list[Any],
        exchange: Exchange | None,
    ) -> list[Shapes | None]:
        """The shapes of all replicas' elements; keeps in `told` what they are like."""
        shapes = [p and [list(leaf.shape) for leaf in p.leaves] for p in parts]
        messages: list[Any] = [[shapes, news]]
        if exchange is not None:
            messages = exchange.all_gather([shapes, news and blank.to_json(news)])
        for worker, (_, like) in enumerate(messages):
            told[worker] = told[worker] or like
        if not any(told):
            raise self._sources[0].empty()
        if exchange is not None and any(like for _, like in messages):
            blank.check_alike(told)
        return list(itertools.chain.from_iterable(found for found, _ in messages))

    def _warn_dropped(self, count: int) -> None:
        logger.warning(
            "Input: the last %d element%s of the dataset function went unused: %d replicas cannot "
            "share them, and elements of a fixed shape cannot be left empty. Use batches without "
            "drop_remainder, or a number of elements that the replicas divide.",
            count,
            "" if count == 1 else "s",
            self.placement.num_replicas,
        )

    def redistribute(self, placement: Placement, workers: Workers) -> NoReturn:
        """Impossible: no other worker can read what a lost one had not read yet."""
        raise NotImplementedError(
            "Expected a dataset whose batches every worker can read, to go on with other workers "
            f"in the middle of a pass. Got {self.how}: the rest of a lost worker's data is out of "
            "reach. Begin a new pass with a new dataset, or use "
            "experimental_distribute_dataset with policy AUTO, DATA or FILE."
        )

    def element_spec(self) -> Any:
        """From the dataset's own spec where it has one, else from its first element."""
        source = self._sources[0]
        spec = source.spec
        if spec is None:
            with self._places[0]():
                leaves, treedef = read_element(source.first(), 0)
            spec = treedef.unflatten([spec_of(leaf, static_rows=self.static) for leaf in leaves])
        return spec_of_worker(spec, self.placement, split=False)


class DealSteps(Iterator[Step]):
    """One pass over the elements of a `DealFeed`."""

    def __init__(self, feed: DealFeed):
        self._feed = feed
        self._elements = feed.open()
        self._hands: Iterator[Hand] | None = None
        self._count = 0
        self._said = False

    def __next__(self) -> Step:
        if self._hands is None:
            self._hands = self._begin()
        hand = next(self._hands)
        self._count += 1
        feed = self._feed
        structure = hand.parts[0].treedef
        leaves = [
            feed.placement.deal(
                [part.leaves[i] for part in hand.parts],
                [tuple(shapes[i]) for shapes in hand.shapes],
            )
            for i in range(structure.num_leaves)
        ]
        rows = tuple(shapes[0][0] if shapes[0] else 1 for shapes in hand.shapes)
        shown = () if self._said else first_rows(hand.parts[0].leaves[0])
        self._said = True
        if not feed.logged:
            log_first_step(feed, rows)
            feed.logged = True
        return Step(structure.unflatten(leaves), rows, shown)

    def _begin(self) -> Iterator[Hand]:
        elements = itertools.islice(self._elements, self._count, None)
        if self._feed.workers.count == 1:
            return self._feed.agree(elements, None)
        exchange = self._feed.workers.exchange()
        return Prefetch(self._feed.agree(elements, exchange), exchange)

    def get_state(self) -> Any:
        """The steps given, of this number of workers."""
        feed = self._feed
        return {
            "steps": self._count,
            "workers": feed.workers.count,
            "replicas": feed.placement.num_replicas,
        }

    def set_state(self, state: Any) -> None:
        """Reads and drops what comes before, at the next step."""
        now = self.get_state()
        if (now["workers"], now["replicas"]) != (state["workers"], state["replicas"]):
            raise NotImplementedError(
                f"Expected the {state['workers']} workers and {state['replicas']} replicas that "
                f"the position in the data was kept with. Got {now['workers']} and "
                f"{now['replicas']}, and {self._feed.how}. Begin the pass anew, or use "
                "experimental_distribute_dataset with policy AUTO, DATA or FILE."
            )
        if self._hands is not None:
            self.close()
            self._elements = self._feed.open()
            self._hands = None
        self._count = state["steps"]

    def redistribute(self, again: bool) -> NoReturn:
        """Refused by the feed before."""
        raise NotImplementedError

    def position(self, again: bool) -> NoReturn:
        """Refused by the feed before."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the thread that reads ahead."""
        if isinstance(self._hands, Prefetch):
            self._hands.close()
        self._hands = iter(())


def _next(reader: Iterator[Any], index: int, keep: bool) -> Element | None:
    for element in reader:
        leaves, treedef = read_element(element, index)
        return Element([owned_array(x) for x in leaves] if keep else leaves, treedef)
    return None


def _filled(
    parts: list[Element | None],
    shapes: list[Shapes | None],
    filler: Shapes,
    like: Element,
) -> Hand:
    """Empty elements in place of those that are missing."""
    empty = [[0, *shape[1:]] for shape in filler]
    whole = [blank.without_rows(like, empty) if part is None else part for part in parts]
    return Hand(whole, [empty if shape is None else shape for shape in shapes])
