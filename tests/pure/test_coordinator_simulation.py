"""A thousand workers that come and go, on a simulated clock."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from random import Random

import pytest

from stratagem.coordinator.consistency import Asynchronous, Bounded, Synchronous
from stratagem.coordinator.instructions import Dispatch, Go, Instruction, Wait
from stratagem.coordinator.state import State, Terms

sys.path.insert(0, str(Path(__file__).parent))

from coordinator_world import World


@pytest.mark.parametrize(
    "consistency", [Asynchronous(), Bounded(2500), Synchronous(backup=50)], ids=repr
)
def test_a_thousand_workers_of_which_one_in_fifty_is_lost_use_each_batch_once(consistency):
    random = Random(1)
    world = World(Terms(consistency), 1000)
    world.eat(world.state.add_dataset("epoch", 0.0))
    names = list(world.incarnations)
    for _ in range(4000):
        world.schedule(dataset="epoch")
    for step in range(4000):
        if world.commits:
            world.commit()
        if not world.tasks:
            break
        index = random.randrange(len(world.tasks))
        world.tasks[index], world.tasks[-1] = world.tasks[-1], world.tasks[index]
        world.go_on(world.tasks[-1])
        if step % 50 == 0:
            world.fall(random.choice(names), dead=random.random() < 0.5)
            world.rise(random.choice(names), anew=random.random() < 0.5)
    world.run(random, limit=60_000)
    world.check()
    assert len(world.batches) == 4000
    assert world.state.counts.ended == 0
    assert world.state.counts.reruns > 0
    if isinstance(consistency, Bounded):
        assert world.state.staleness.max <= 2500


@pytest.mark.parametrize("workers", [2, 1000])
def test_events_take_microseconds_however_many_workers_there_are(workers):
    state = State(Terms())
    flying: list[Dispatch] = []

    def eat(instructions: list[Instruction]) -> None:
        flying.extend(each for each in instructions if isinstance(each, Dispatch))

    for index in range(workers):
        eat(state.worker_up(f"worker {index}", 1, 0.0))
    start, events = time.perf_counter(), 0
    for _ in range(5000):
        answer, out = state.ask("schedule", 0.0)
        assert isinstance(answer, Go)
        assert not out
        eat(state.schedule(0.0)[1])
        events += 2
        if len(flying) >= 2 * workers:
            done = flying.pop(0)
            eat(state.finished(done.worker, 1, done.closure, "ok", 0.0))
            events += 1
    seconds = time.perf_counter() - start
    assert isinstance(state.ask("join", 0.0)[0], Wait)
    for done in flying:
        state.finished(done.worker, 1, done.closure, "ok", 0.0)
    assert isinstance(state.ask("join", 0.0)[0], Go)
    assert state.below == 5000
    assert events / seconds > 3000, "a busy machine is three times slower than it need be"
