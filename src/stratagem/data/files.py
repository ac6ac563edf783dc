"""Datasets made of files, whose global batches are the same on any number of workers."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from stratagem.data.adapt import SelfDescribed, Source
from stratagem.data.batch import Element, read_batch, read_element
from stratagem.data.lanes import Gather, Lane, joined, next_counts
from stratagem.data.owned import owned

Reader = Callable[[str], Any]


class FileStep(NamedTuple):
    """A global batch, and this worker's rows of it.

    Args:
        counts: rows of each lane of the job.
        rows: those of this worker's lanes, lane after lane.
        state: where the pass is after it.
    """

    counts: list[int]
    rows: Element
    state: Any


class FileBatches(SelfDescribed):
    """Rows of files, in batches. Made by `from_files`; iterate it repeatedly."""

    def __init__(
        self,
        files: str | Sequence[str],
        reader: Reader,
        batch_size: int,
        *,
        drop_remainder: bool,
        shuffle_seed: int | None,
        interleave: int,
    ):
        self.files = _list_files(files)
        _check_arguments(reader, batch_size, interleave)
        self.batch_size = batch_size
        self.interleave = min(interleave, len(self.files))
        self.passes = 0  # begun so far
        self._reader = reader
        self._drop_remainder = drop_remainder
        self._seed = shuffle_seed

    @property
    def settings(self) -> str:
        """What else decides which rows meet in a batch."""
        return (
            f"batch_size={self.batch_size}, interleave={self.interleave}, "
            f"shuffle_seed={self._seed}, drop_remainder={self._drop_remainder}"
        )

    def __iter__(self) -> Iterator[Any]:
        return _Pass(self)

    def as_source(self) -> Source:
        """How it is distributed where every worker reads all files."""
        return Source("files", lambda: iter(self), peek=self._first)

    def _first(self) -> Any:
        step = next(self.steps({"pass": self.passes}), None)
        if step is None:
            raise self.as_source().empty()
        return step.rows.treedef.unflatten(step.rows.leaves)

    def steps(
        self,
        state: Any,
        own: Sequence[int] | None = None,
        gather: Gather | None = None,
        agree: Callable[[Element | None], Element] | None = None,
    ) -> Iterator[FileStep]:
        """The batches of a pass, from a state on.

        Args:
            state: "pass"; with "taken", the rows taken from each lane, and "step", the batches
                they made, it is a state of `FileStep`.
            own: the lanes that this worker reads; None for all.
            gather: see `lanes.next_counts`; None with all lanes.
            agree: makes an element without rows of what this worker has seen, which may be
                nothing, and what others have.
        """
        lanes = range(self.interleave)
        own = lanes if own is None else own
        gather = (lambda found: [found[i] for i in lanes]) if gather is None else gather
        number, step = state["pass"], state.get("step", 0)
        taken = list(state.get("taken") or [0] * self.interleave)
        if len(taken) != self.interleave:
            raise ValueError(
                f"Expected the interleave that the position in the files was kept with, "
                f"{len(taken)}. Got {self.interleave}. Go on with the same files and interleave."
            )
        specs = _Specs()
        opened = {i: Lane(self._chunks(i, number, specs), taken[i]) for i in own}
        alive = [True] * self.interleave
        like: Element | None = None
        while True:
            counts, alive = next_counts(self.batch_size, opened, gather, alive)
            rows = sum(counts)
            if rows == 0 or (self._drop_remainder and rows < self.batch_size):
                return
            pieces = [piece for i in own for piece in opened[i].take(counts[i])]
            step += 1
            taken = [before + count for before, count in zip(taken, counts, strict=True)]
            if like is None:
                like = specs.like if agree is None else agree(specs.like)
            yield FileStep(
                counts,
                joined(pieces, like),
                {"pass": number, "step": step, "taken": taken},
            )

    def _chunks(self, lane: int, number: int, specs: _Specs) -> Iterator[Element]:
        """The chunks of a lane's files. A file stays in its lane, so with its worker."""
        mine = range(lane, len(self.files), self.interleave)
        order: Sequence[int] = mine
        if self._seed is not None:
            order = np.random.default_rng((self._seed, number, lane)).permutation(mine).tolist()
        for file in order:
            path = self.files[file]
            for index, chunk in enumerate(_opened(self._reader, path)):
                element = _read_chunk(chunk, path, index)
                specs.check(element, path)
                rows = len(element.leaves[0])
                if self._seed is not None:
                    rng = np.random.default_rng((self._seed, number, file, index))
                    shuffled = rng.permutation(rows)
                    element = Element([leaf[shuffled] for leaf in element.leaves], element.treedef)
                yield element


class _Specs:
    """Compares what the files hold."""

    def __init__(self) -> None:
        self.like: Element | None = None
        self._first = ""

    def check(self, element: Element, path: str) -> None:
        if self.like is None:
            self.like, self._first = element, path
        elif _spec(self.like) != _spec(element):
            raise ValueError(
                "Expected rows of the same structure, shape and dtype from every file. Got\n"
                f"  {self._first}: {_spec(self.like)}\n  {path}: {_spec(element)}\n"
                "Make the reader give all rows alike."
            )


class _Pass(Iterator[Any]):
    """One pass, which can begin anywhere: with `get_state` and `set_state` as Grain's iterators."""

    _steps: Iterator[FileStep]
    _state: Any

    def __init__(self, files: FileBatches):
        self._files = files
        self.set_state({"pass": files.passes})

    def __next__(self) -> Any:
        step = next(self._steps)
        self._state = step.state
        return step.rows.treedef.unflatten(step.rows.leaves)

    def get_state(self) -> Any:
        """The pass, its batches so far, and the rows taken from each lane of files."""
        return self._state

    def set_state(self, state: Any) -> None:
        """Goes on from a state; later passes follow on its pass. Rows before are read again."""
        self._files.passes = state["pass"] + 1
        self._state = state
        self._steps = self._files.steps(state)


def from_files(
    files: str | Sequence[str],
    reader: Reader,
    batch_size: int,
    *,
    drop_remainder: bool = False,
    shuffle_seed: int | None = None,
    interleave: int = 16,
) -> FileBatches:
    """A dataset made of files, which workers can share by file (`AutoShardPolicy.FILE`).

    Each global batch takes its rows evenly from up to `interleave` files. Which rows it has does
    not depend on the number of workers, nor on whether they share files or rows; so neither does
    the loss, except for rounding. A worker that shares by file opens its own files alone, the same
    ones in every pass: file i is of worker `i mod interleave mod workers`.

    Args:
        files: paths, or a pattern of `glob`, whose files are sorted. With several workers the
            same names on each, though in directories of their own if they like.
        reader: takes a path; returns arrays `[rows, ...]` or a structure of them, or a generator
            of such chunks, for files that do not fit into memory.
        batch_size: rows of a global batch, of all replicas together.
        drop_remainder: leave out a last batch with fewer rows.
        shuffle_seed: other orders on each pass: of the files, and of the rows in each chunk.
        interleave: how many files are read at once, in the whole job. Sharing by file takes at
            least as many as workers. It changes which rows meet in a batch.

    Returns:
        An iterable of batches with the structure of what `reader` returns.

    Raises:
        FileNotFoundError: no file matches the pattern.
        ValueError: no files, the same file twice, or a batch size or interleave below 1.
        TypeError: paths that are no text, or a reader that cannot be called.
    """
    return FileBatches(
        files,
        reader,
        batch_size,
        drop_remainder=drop_remainder,
        shuffle_seed=shuffle_seed,
        interleave=interleave,
    )


def _list_files(files: Any) -> tuple[str, ...]:
    if isinstance(files, str):
        found = sorted(glob.glob(files))
        if not found:
            raise FileNotFoundError(
                f"Expected files to match {files!r}. Got none, in {os.getcwd()!r}. Check the "
                "pattern and the directory, on every worker."
            )
        return tuple(found)
    listed = list(files)
    wrong = [f"{path!r}" for path in listed if not isinstance(path, (str, os.PathLike))]
    if wrong:
        raise TypeError(f"Expected paths of files. Got {', '.join(wrong)}. Pass text or pathlib's.")
    paths = tuple(os.fspath(path) for path in listed)
    if not paths:
        raise ValueError("Expected at least one file. Got an empty list.")
    twice = [path for path, count in Counter(paths).items() if count > 1]
    if twice:
        raise ValueError(
            f"Expected every file once. Got several times: {', '.join(twice)}. Each row counts "
            "once a pass; list a file once."
        )
    return paths


def _check_arguments(reader: Any, batch_size: int, interleave: int) -> None:
    if not callable(reader):
        raise TypeError(
            f"Expected a reader that takes a path and returns arrays. Got {type(reader).__name__}. "
            "Pass a function, such as numpy.load."
        )
    small = {"batch_size": batch_size, "interleave": interleave}
    problems = [f"{name}={value}" for name, value in small.items() if value < 1]
    if problems:
        raise ValueError(f"Expected values of at least 1. Got {', '.join(problems)}.")


def _opened(reader: Reader, path: str) -> Iterator[Any]:
    read = reader(path)
    if isinstance(read, list):
        raise TypeError(
            "Expected the reader to return arrays [rows, ...], a tuple or dict of them, or a "
            f"generator of such chunks. Got a list for {path!r}, which may be rows or chunks. "
            "Stack the rows (numpy.stack), or yield the chunks."
        )
    # A lane keeps what is left of a chunk while it reads the next one.
    return map(owned, read) if isinstance(read, Iterator) else iter([read])


def _read_chunk(chunk: Any, path: str, index: int) -> Element:
    try:
        element = read_element(chunk, index)
        if any(leaf.shape[:1] != (0,) for leaf in element.leaves):  # an empty file is no error
            element, _ = read_batch(chunk, index)
    except (TypeError, ValueError) as error:
        raise type(error)(f"File {path!r}, chunk {index} as the batch: {error}") from error
    return element


def _spec(element: Element) -> str:
    leaves = [f"{leaf.dtype}{list(leaf.shape[1:])}" for leaf in element.leaves]
    return str(element.treedef.unflatten(leaves))
