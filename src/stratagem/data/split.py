"""How many rows of a batch each replica gets, and each file gives, as plain integers."""

from __future__ import annotations

import enum
from collections.abc import Sequence


class RebatchRule(enum.Enum):
    """How the rows of a global batch are dealt to the replicas.

    `CEIL`: every replica takes `ceil(rows / replicas)` rows until none are left, so the last
    replicas may stay empty even on a full batch (4 rows on 3 replicas: 2, 2, 0).
    `EVEN`: the counts differ by at most one (4 rows on 3 replicas: 2, 1, 1).
    TF uses CEIL for the policies AUTO and DATA, EVEN for OFF, FILE and HINT.
    """

    CEIL = "CEIL"
    EVEN = "EVEN"


def split_rows(
    rows: int,
    num_replicas: int,
    rule: RebatchRule,
    *,
    full_rows: int | None = None,
    num_workers: int = 1,
    worker: int = 0,
) -> tuple[int, ...]:
    """Deals one batch to the replicas of the job.

    Args:
        rows: rows of this batch.
        num_replicas: replicas of all workers together, a multiple of `num_workers`.
        rule: how to deal.
        full_rows: rows of a full batch. With it, EVEN keeps the pattern of a full batch and fills
            it in order, as TF does for the batches of a stream (6 rows in batches of 4 on 2
            replicas: 2+2, then 2+0). Without it each batch is dealt evenly by itself (1+1).
            CEIL always looks at each batch by itself.
        num_workers: workers of the job.
        worker: the worker whose pattern is asked for; see `even_pattern`.

    Returns:
        One row count a replica; they add up to `rows`.

    Raises:
        ValueError: a count is out of range, or `rows` does not fit the pattern of `full_rows`.
    """
    _check(rows, num_replicas, num_workers, worker)
    if rule is RebatchRule.CEIL:
        share = -(-rows // num_replicas)
        return tuple(min(share, max(0, rows - i * share)) for i in range(num_replicas))
    full_rows = rows if full_rows is None else full_rows
    if rows > full_rows:
        raise ValueError(
            f"Expected a batch of at most full_rows={full_rows} rows. Got rows={rows}. "
            "Leave full_rows out when batches grow."
        )
    counts = []
    left = rows
    for size in even_pattern(full_rows, num_replicas, num_workers=num_workers, worker=worker):
        counts.append(min(size, left))
        left -= counts[-1]
    return tuple(counts)


def even_pattern(
    batch_rows: int, num_replicas: int, *, num_workers: int = 1, worker: int = 0
) -> tuple[int, ...]:
    """Sizes that differ by at most one, larger ones first, rotated by worker.

    Each worker starts at its own replicas, so that at any step the sizes of all workers' replicas
    together are those of one global batch: 7 rows on 2 workers of 2 replicas give 2, 2, 2, 1 to
    worker 0 and 2, 1, 2, 2 to worker 1.

    Args:
        batch_rows: rows of a full global batch.
        num_replicas: replicas of all workers together, a multiple of `num_workers`.
        num_workers: workers of the job.
        worker: the worker that asks, from 0.
    """
    _check(batch_rows, num_replicas, num_workers, worker)
    share, extra = divmod(batch_rows, num_replicas)
    sizes = [share + (i < extra) for i in range(num_replicas)]
    start = worker * (num_replicas // num_workers)
    return tuple(sizes[start:] + sizes[:start])


def fill_batch(batch_size: int, at_hand: Sequence[int]) -> list[int]:
    """How many rows each lane of files gives to a batch: as evenly as what they hold allows.

    What does not divide is given by the first lanes, always: so the counts stay the same from
    batch to batch while no lane ends, and with them the compiled step.

    Args:
        batch_size: rows wanted.
        at_hand: rows of each lane.

    Returns:
        A count a lane; together `batch_size`, or all there is.
    """
    counts = [0] * len(at_hand)
    left = min(batch_size, sum(at_hand))
    while left:
        unused = [lane for lane, rows in enumerate(at_hand) if rows > counts[lane]]
        share = left // len(unused)
        for lane in unused if share else unused[:left]:
            given = min(max(1, share), at_hand[lane] - counts[lane])
            counts[lane] += given
            left -= given
    return counts


def row_slices(counts: Sequence[int]) -> tuple[slice, ...]:
    """The slice of the batch that each replica takes, for the counts of `split_rows`."""
    slices = []
    start = 0
    for count in counts:
        slices.append(slice(start, start + count))
        start += count
    return tuple(slices)


def _check(rows: int, num_replicas: int, num_workers: int, worker: int) -> None:
    problems = []
    if rows < 0:
        problems.append(f"rows={rows} is negative")
    if num_replicas < 1:
        problems.append(f"num_replicas={num_replicas} is not positive")
    if num_workers < 1:
        problems.append(f"num_workers={num_workers} is not positive")
    elif num_replicas % num_workers:
        problems.append(f"num_replicas={num_replicas} is no multiple of num_workers={num_workers}")
    if not 0 <= worker < max(num_workers, 1):
        problems.append(f"worker={worker} is not in 0..{num_workers - 1}")
    if problems:
        raise ValueError(
            "Expected rows >= 0 and the same number of replicas (1 or more) on every worker. "
            f"Got {'; '.join(problems)}."
        )
