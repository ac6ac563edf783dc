"""What a worker holds: plans as it runs them, and closures whose pushes are on their way."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stratagem.coordinator.per_worker import Taken
from stratagem.coordinator.replies import Reply
from stratagem.parameter_server.client import Pending, Pushed
from stratagem.parameter_server.plan import Unit
from stratagem.parameter_server.rounds import weighed
from stratagem.step.parts import Parts
from stratagem.step.runner import Runner


class Variant:
    """A plan as a worker holds it.

    Attributes:
        elements: (position of its iterator, turn) of each element that it reads, in order.
        staged: the updates that wait for the round's commit; None for all.
        units: the updates that it pushes to, by name.
        zeros: what a closure starts with of the coordinator's own variables.
    """

    def __init__(self, fields: Mapping[str, Any], parts: Parts):
        self.plan = fields["plan"]
        self.runner = Runner(parts)
        self.staged = fields["staged"]
        self.units = {uid: Unit(uid, tuple(vids), {}) for uid, vids in fields["units"]}
        self.zeros = [np.zeros(shape, dtype) for shape, dtype in fields["local"]]
        self.elements = [(p, turn) for p, turn in fields["elements"]]

    def handed(self, item: Mapping[str, Any], share: float) -> Sequence[tuple[str, np.ndarray]]:
        """What an update is handed. What does not wait for its round is weighed as in a round, so
        that rows of tables move no further with more workers."""
        handed: Sequence[tuple[str, Any]] = item["handed"]
        if self.staged is None or item["uid"] in self.staged or share == 1.0:
            return handed
        return [(kind, x if kind == "scalar" else weighed(x, share)) for kind, x in handed]


@dataclasses.dataclass(slots=True)
class Pushing:
    """A closure whose push is on its way.

    Attributes:
        reply: takes the answer.
        pushed: the push.
        variant: number of its plan.
        results: what it is answered with.
        taken: elements that it has read.
    """

    reply: Reply
    pushed: Pending[Pushed]
    variant: int
    results: tuple[np.ndarray, ...]
    taken: Taken
