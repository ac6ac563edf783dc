"""A round that a server cannot apply ends training with an error, or is made again; no wait."""

from __future__ import annotations

import threading

import keras
import pytest

from stratagem.coordinator import ClusterCoordinator
from stratagem.coordinator.guard import Guard
from stratagem.errors import StratagemError
from stratagem.parameter_server.store import Store


def test_a_round_that_cannot_be_applied(served, monkeypatch):
    strategy = served(2, 1, consistency="synchronous")
    with strategy.scope():
        total = keras.Variable(0.0)

    def commit(*_args, **_kwargs):
        raise ValueError("expected a round that can be applied. Got none.")

    monkeypatch.setattr(Store, "commit", commit)
    coordinator = ClusterCoordinator(strategy)

    def train():
        for _ in range(6):
            coordinator.schedule(lambda: total.assign_add(1.0))
        coordinator.join()

    with pytest.raises(StratagemError, match="ps 0 .* to go on. Got .*expected a round"):
        train()


def test_a_round_that_a_server_lacks_is_computed_again(served, monkeypatch):
    """The program has the results by then; the closures run again all the same, and count once."""
    strategy = served(2, 1, consistency="synchronous")
    with strategy.scope():
        total = keras.Variable(0.0)
    commit, lost, applied = Guard.commit, [], []

    def lose_the_first(self, what):
        if lost:
            applied.append(what)
            commit(self, what)
            return
        lost.append(what)
        self._event(lambda state, now: state.lacks(what.round, now))

    monkeypatch.setattr(Guard, "commit", lose_the_first)
    coordinator = ClusterCoordinator(strategy)
    for _ in range(4):
        coordinator.schedule(lambda: total.assign_add(1.0))
    joined = threading.Thread(target=coordinator.join, daemon=True)
    joined.start()
    joined.join(20.0)
    assert not joined.is_alive()
    # A round is as large as there are workers when it begins: the second may come a moment later.
    assert sorted(token for what in applied for token in what.tokens) == [0, 1, 2, 3]
    assert float(total.numpy()) == len(applied)  # each applies a mean, of ones
    assert coordinator.counts.reruns == len(lost[0].tokens)
    assert not coordinator.dispatcher._again
