"""Closures that leave together for a worker, with a peer that keeps what it is asked."""

from __future__ import annotations

import numpy as np
import pytest

from stratagem.coordinator.crew import Crew
from stratagem.errors import PeerLostError
from stratagem.transport.bundles import MOST_BYTES
from stratagem.transport.message import Message

SMALL, LARGE = np.zeros(2, np.float32), np.zeros(MOST_BYTES + 1, np.uint8)


class Peer:
    """A worker that answers nothing by itself."""

    incarnation, silence = "first", 0.0

    def __init__(self):
        self.asked = []

    def post(self, method, fields, arrays=(), *, seconds, done=None):
        if any(one.get("wrong") for one in fields.get("each", ())):
            raise ValueError("no message")
        if method == "setup":
            done(Message("ready", {}))
        else:
            self.asked.append((method, fields, list(arrays), done))


class Hub:
    def __init__(self):
        self.peer = Peer()

    def connect(self, address, name):
        return self.peer


class World:
    def __init__(self):
        hub, self.answers = Hub(), {}
        self.crew = Crew({}, lambda change: None)
        self.crew.connect(hub, [("worker 0", "here:1")])
        self.asked = hub.peer.asked
        self.run("first")  # results are small: the next ones may be answered together
        self.asked.pop()[-1](Message("ran", {"each": [{"arrays": 0}]}))

    def run(self, closure, arrays=(), together=4, **more):
        def done(incarnation, answer):
            assert incarnation == "first"
            self.answers[closure] = answer

        fields = {"closure": closure, "family": 1, **more}
        self.crew.run("worker 0", fields, arrays, done, together)

    def sent(self):
        """Closures by message, or the other methods."""
        return [
            [one["closure"] for one in fields["each"]] if method == "run" else method
            for method, fields, _, _ in self.asked
        ]


def test_closures_leave_together_when_there_are_enough_or_at_a_flush():
    world = World()
    for closure in range(6):
        world.run(closure)
    assert world.sent() == [[0, 1, 2, 3]]
    world.crew.flush()
    world.crew.flush()
    assert world.sent() == [[0, 1, 2, 3], [4, 5]]


def test_each_gets_its_part_of_the_answer():
    world = World()
    world.run(0, [SMALL])
    world.run(1)
    world.run(2, [SMALL + 1, SMALL + 2])
    world.crew.flush()
    _, fields, arrays, done = world.asked[0]
    assert [one["arrays"] for one in fields["each"]] == [1, 0, 2]
    np.testing.assert_array_equal(arrays, [SMALL, SMALL + 1, SMALL + 2])
    each = [{"outcome": "ok", "arrays": 2}, {"outcome": "error", "arrays": 0}]
    done(Message("ran", {"each": [*each, {"outcome": "ok", "arrays": 1}]}, (SMALL,) * 3))
    assert [world.answers[i].fields["outcome"] for i in range(3)] == ["ok", "error", "ok"]
    assert [len(world.answers[i].arrays) for i in range(3)] == [2, 0, 1]


def test_a_lost_worker_has_lost_all_of_them():
    world = World()
    world.run(0)
    world.run(1)
    world.crew.flush()
    world.asked[0][3](PeerLostError("gone"))
    assert [str(world.answers[i]) for i in (0, 1)] == ["gone", "gone"]


@pytest.mark.parametrize(("arrays", "together"), [([LARGE], 4), ([], 1)])
def test_long_and_large_ones_leave_by_themselves_after_those_before(arrays, together):
    world = World()
    world.run(0)
    world.run(1, arrays, together)
    assert world.sent() == [[0], [1]]


def test_those_with_large_results_leave_by_themselves():
    world = World()
    world.run(0)
    world.crew.flush()
    world.asked[0][-1](Message("ran", {"each": [{"arrays": 1}]}, (LARGE,)))
    world.run(1)
    world.run(2)
    assert world.sent() == [[0], [1], [2]]


def test_one_that_cannot_be_sent_fails_alone():
    world = World()
    world.run(0)
    world.run(1, wrong=True)
    world.run(2)
    world.crew.flush()
    assert world.sent() == [[0], [2]]
    assert str(world.answers[1]) == "no message"


def test_what_is_cancelled_has_been_sent():
    world = World()
    world.run(0)
    world.crew.cancel("worker 0", 0)
    assert world.sent() == [[0], "cancel"]
