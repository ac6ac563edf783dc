"""Whatever happens to a job, in whatever order: each closure ends once, each batch counts once."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from stratagem.coordinator.consistency import (
    Asynchronous,
    Bounded,
    Consistency,
    Synchronous,
)
from stratagem.coordinator.instructions import Raise
from stratagem.coordinator.state import Terms

sys.path.insert(0, str(Path(__file__).parent))

from coordinator_world import World

NUMBERS = st.integers(0, 999)


class Job(RuleBasedStateMachine):
    """A small job of which everything can be lost, at any moment."""

    consistency: Consistency = Asynchronous()

    @initialize(
        workers=st.integers(1, 4),
        depth=st.integers(1, 3),
    )
    def begin(self, workers: int, depth: int) -> None:
        terms = Terms(self.consistency, depth, queue_limit=8, snapshot_closures=3, patience=0.05)
        self.world = World(terms, workers)
        self.world.lengths = {"each 0": 3}
        self.iterators = 1
        self.world.eat(self.world.state.add_dataset("data", 0.0))
        self.epochs = 0
        self.servers = 1
        self.errors: list[BaseException] = []
        self.raised = 0

    def name(self, pick: int) -> str:
        names = list(self.world.incarnations)
        return names[pick % len(names)]

    @rule(kind=st.sampled_from(["plain", "data", "data", "each", "read"]))
    def schedule(self, kind: str) -> None:
        world = self.world
        if kind == "data":
            world.schedule(dataset="data")
        elif kind == "each":
            world.schedule(iterators=(f"each {self.iterators - 1}",))
        else:
            world.schedule(pushes=kind == "plain")

    @rule(question=st.sampled_from(["join", "done", "schedule"]))
    def ask(self, question: str) -> None:
        answer = self.world.ask(question)  # type: ignore[arg-type]
        if isinstance(answer, Raise):
            assert not self.world.state.unfinished, "raised while closures are in flight"
            self.raised += 1

    @rule(pick=NUMBERS, times=st.integers(1, 4))
    def work(self, pick: int, times: int) -> None:
        for _ in range(times):
            if self.world.tasks:
                self.world.go_on(self.world.tasks[pick % len(self.world.tasks)])

    @rule(pick=NUMBERS, outcome=st.sampled_from(["error", "needs-program", "aborted"]))
    def trouble(self, pick: int, outcome: str) -> None:
        fresh = [task for task in self.world.tasks if not task.pushed and task.outcome == "ok"]
        if fresh:
            fresh[pick % len(fresh)].outcome = outcome

    @rule(pick=NUMBERS, dead=st.booleans())
    def fall(self, pick: int, dead: bool) -> None:
        self.world.fall(self.name(pick), dead)

    @rule(pick=NUMBERS, anew=st.booleans())
    def rise(self, pick: int, anew: bool) -> None:
        self.world.rise(self.name(pick), anew)

    @precondition(lambda self: self.world.server_here)
    @rule()
    def lose_server(self) -> None:
        self.world.lose_server()

    @precondition(lambda self: not self.world.server_here)
    @rule()
    def restore_server(self) -> None:
        self.servers += 1
        self.world.restore_server(self.servers)

    @precondition(lambda self: self.world.commits)
    @rule()
    def commit(self) -> None:
        self.world.commit()

    @precondition(lambda self: self.world.snapshots)
    @rule(fine=st.booleans())
    def snapshot(self, fine: bool) -> None:
        number = self.world.snapshots.pop()
        state = self.world.state
        if fine:
            self.world.eat(state.snapshot_written(number, self.world.now))
        else:
            self.world.eat(state.snapshot_failed(number, "full", self.world.now))

    @rule()
    def renew(self) -> None:
        """The program lets go of an iterator, and reads another one from now on."""
        self.release()
        self.world.lengths[f"each {self.iterators}"] = 3
        self.iterators += 1

    def release(self) -> None:
        world = self.world
        world.eat(world.state.release_iterator(f"each {self.iterators - 1}", world.now))

    @rule(seconds=st.sampled_from([0.01, 0.2, 1.0]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.eat(self.world.state.tick(self.world.now))

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world, random = self.world, Random(0)
        world.run(random)
        world.check()
        self.release()
        assert world.forgotten == {f"each {i}" for i in range(self.iterators)}
        state = world.state
        assert not any(needs for needs, _, _ in state._queue._kinds)
        assert list(state._workers._pools) == [frozenset()]
        assert not any(worker.ended for worker in state._workers)
        # Batches that were given back come first when others are asked for, each batch once.
        leased = {lease.batch for lease in world.leases.values() if lease is not None}
        for _ in leased:
            if state._data["data"].done.below < len(leased):
                assert world.schedule(dataset="data") is not None
                world.run(random)
        world.check()
        assert state._data["data"].done.below >= len(leased)
        expected = {("data", batch) for batch in range(len(leased))}
        assert set(world.batches) <= expected
        assert len(expected) - len(world.batches) <= world.state.counts.failed
        if isinstance(world.terms.consistency, Bounded):
            assert world.server.stalest <= world.terms.consistency.max_staleness
            assert world.state.staleness.max <= world.server.stalest
        if world.terms.consistency == Synchronous():
            assert not world.dropped, "without backup workers no row is dropped"


@pytest.mark.parametrize(
    "consistency",
    [
        Asynchronous(),
        Bounded(0),
        Bounded(2),
        Bounded(5),
        Synchronous(),
        Synchronous(backup=1),
        Synchronous(backup=2, hybrid=True),
    ],
    ids=repr,
)
def test_each_closure_ends_once_and_each_batch_counts_once(consistency):
    class Case(Job):
        pass

    Case.consistency = consistency
    case = Case.TestCase()
    case.settings = settings(max_examples=20, stateful_step_count=30)
    case.runTest()
