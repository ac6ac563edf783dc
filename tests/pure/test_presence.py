"""When a task counts as lost."""

from __future__ import annotations

import types

from stratagem.coordinator.presence import why_lost


def peer(incarnation, silence=0.0):
    return types.SimpleNamespace(incarnation=incarnation, silence=silence)


def test_who_is_heard_is_there():
    assert why_lost(peer("a", 4.9), "a") == ""
    assert why_lost(peer(None), "a") == ""  # a new connection, which has heard nothing yet
    assert why_lost(peer("b", 99.0), None) == ""  # it did not take part


def test_why_a_task_is_lost():
    assert why_lost(peer("b"), "a") == "its process ended, and another one has begun"
    assert why_lost(peer("a", 5.25), "a") == "it has not been heard for 5.2 s"
