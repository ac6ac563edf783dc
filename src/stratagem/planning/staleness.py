"""How stale gradients are, and how fast a job is: simulated under the coordinator's own `State`.

What is simulated is time: of messages, of the servers' processors and networks, of computing. Who
executes which closure when, and what a rule of consistency holds back, `coordinator/state.py`
decides, as in a job.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from stratagem.coordinator.consistency import Asynchronous, Consistency
from stratagem.planning.job import SERVERS, Job
from stratagem.planning.servers import Costs

JITTER = 0.1  # standard deviation of the time of computing, of its mean
_EVENTS = 300_000  # of a simulation, where that is enough for some steps of each worker
_LEAST, _MOST = 4, 400  # steps of each worker
_WARM = 2  # steps of each worker that are not counted


@dataclass(frozen=True)
class Simulated:
    """What came out, the first steps left out. Times are seconds.

    Attributes:
        closures: steps that were counted.
        rate: of them a second, those left out whose gradients came too late.
        histogram: how many pushes had which staleness: other pushes between pull and push.
        waiting: mean time of a worker between two steps.
        pull: mean time of pulling.
        compute: mean time of computing.
        push: mean time of pushing.
        dropped: part of the steps whose gradients came too late for their round.
        busy: for each kind of resource the part of the time that the busiest one is busy.
    """

    closures: int
    rate: float
    histogram: dict[int, int]
    waiting: float
    pull: float
    compute: float
    push: float
    dropped: float
    busy: dict[str, float]

    @property
    def mean(self) -> float:
        """The mean staleness."""
        count = sum(self.histogram.values())
        return sum(s * n for s, n in self.histogram.items()) / count if count else 0.0

    def quantile(self, part: float) -> int:
        """The least staleness that so large a part of the pushes does not exceed."""
        left = part * sum(self.histogram.values())
        for staleness in sorted(self.histogram):
            left -= self.histogram[staleness]
            if left <= 0:
                return staleness
        return max(self.histogram, default=0)


def simulate(
    costs: Costs,
    workers: int,
    consistency: Consistency | None = None,
    *,
    steps: int | None = None,
    jitter: float = JITTER,
    seed: int = 0,
) -> Simulated:
    """Runs a job of equal workers for a while.

    Args:
        costs: of a step.
        workers: how many.
        consistency: the rule of the job; None: asynchronous.
        steps: of each worker, besides those that are not counted; None: some hundreds, or fewer so
            that it takes seconds.
        jitter: standard deviation of the time of computing, of its mean (gamma distribution).
        seed: of the random numbers.
    """
    if steps is None:
        each = 8 * min(SERVERS, len(costs.exchanges)) + 8
        steps = min(_MOST, max(_LEAST, _EVENTS // (each * workers)))
    rule = Asynchronous() if consistency is None else consistency
    job = Job(costs, workers, rule, jitter, Random(seed))
    job.start()
    start = job.until(_WARM * workers)
    histogram, counted, dropped = job.histogram, job.counted, job.dropped
    job.times.clear()
    lines = job.lines()
    busy = {kind: [line.busy for line in each] for kind, each in lines.items()}
    end = job.until(counted + dropped + steps * workers)
    seconds = max(end - start, 1e-12)
    done, late = job.counted - counted, job.dropped - dropped
    waiting, pull, compute, push = (sum(t) / len(t) for t in zip(*job.times, strict=True))
    return Simulated(
        closures=done + late,
        rate=done / seconds,
        histogram=dict(job.histogram - histogram),
        waiting=waiting,
        pull=pull,
        compute=compute,
        push=push,
        dropped=late / max(1, done + late),
        busy={
            kind: max((x.busy - b for x, b in zip(each, busy[kind], strict=True)), default=0.0)
            / seconds
            for kind, each in lines.items()
        },
    )
