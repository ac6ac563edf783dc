"""A round that a server cannot apply ends training with an error, and no wait."""

from __future__ import annotations

import keras
import pytest

from stratagem.coordinator import ClusterCoordinator
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
