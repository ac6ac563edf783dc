"""What the coordinator's state tells the thread that owns the connections to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

Outcome: TypeAlias = Literal["ok", "error", "needs-program", "data-ended", "aborted"]
"""How a worker says a closure ended; `"aborted"`: nothing is wrong with it, it may run again."""

Resolution: TypeAlias = Literal["ok", "error", "cancelled", "ended"]
"""How a closure ends for the user's program; `"ended"`: there was no data left for it."""


class Lease(NamedTuple):
    """A batch of an accounted dataset, for one closure alone."""

    dataset: str
    batch: int


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A worker is to execute a closure.

    Args:
        token: number under which the closure pushes. It is the closure's own, but where a batch
            was leased before the coordinator was restarted: then it is that of the first lease,
            so that a push that came through is not applied a second time.
        lease: the batch to execute it with; None where the closure needs none.
        round: round of synchronous training in which its gradients are staged; None otherwise.
        fresh: whether the lease is new, so that the journal has to hear of it first.
        below: all tokens below this one are finished; servers need not remember them.
        together: how many closures may travel in one message, and be answered in one, as all of
            them take little.
    """

    worker: str
    closure: int
    token: int
    lease: Lease | None
    round: int | None
    fresh: bool
    below: int
    together: int = 1


@dataclass(frozen=True, slots=True)
class Install:
    """A worker lacks the program of a closure; a `Dispatch` of it to that worker follows."""

    worker: str
    closure: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """A worker need not go on with a closure; it answers all the same."""

    worker: str
    closure: int


@dataclass(frozen=True, slots=True)
class Commit:
    """All servers apply the staged gradients of a round, as one; then `State.committed`.

    What others have staged for the round is dropped, and what they will.

    Args:
        tokens: whose gradients, in the order in which they came.
        weights: one for each, 1 in all: the share of its rows, or equal where rows are unknown.
    """

    round: int
    tokens: tuple[int, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Restore:
    """A server has come back empty: its content is to be restored; then `State.restored`."""

    server: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All servers write a snapshot; then `State.snapshot_written` or `snapshot_failed`."""

    number: int


@dataclass(frozen=True, slots=True)
class Pause:
    """No closure is dispatched until `Resume`; the state sees to that itself."""

    why: str


@dataclass(frozen=True, slots=True)
class Resume:
    """Closures are dispatched again."""


@dataclass(frozen=True, slots=True)
class Released:
    """A worker that was removed has nothing left to do."""

    worker: str


@dataclass(frozen=True, slots=True)
class Forget:
    """No closure will read a per-worker iterator any more: workers need not keep it."""

    iterator: str


@dataclass(frozen=True, slots=True)
class Resolve:
    """A closure has ended for the user's program; comes once for each.

    Args:
        result: what the worker sent: the value for `"ok"`, the exception for `"error"`.
    """

    closure: int
    outcome: Resolution
    result: Any = None


@dataclass(frozen=True, slots=True)
class Counted:
    """The effects of a closure are in the variables, or were dropped; comes once for each token.

    Args:
        dropped: whether its gradients came too late for its round of synchronous training.
        pushes: whether it may have changed variables.
    """

    token: int
    lease: Lease | None
    dropped: bool
    pushes: bool = True


@dataclass(frozen=True, slots=True)
class Wake:
    """What blocked callers wait for may have come: they ask again."""


@dataclass(frozen=True, slots=True)
class Warn:
    """The user is told; nothing ends."""

    text: str


Instruction: TypeAlias = (
    Dispatch
    | Install
    | Cancel
    | Commit
    | Restore
    | Snapshot
    | Pause
    | Resume
    | Released
    | Forget
    | Resolve
    | Counted
    | Wake
    | Warn
)


@dataclass(frozen=True, slots=True)
class Go:
    """The caller may go on: schedule, return from `join`, say that all is done."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The caller blocks until the next `Wake`, and asks again."""


@dataclass(frozen=True, slots=True)
class NotDone:
    """Answer to `done`: closures are queued or in flight."""


@dataclass(frozen=True, slots=True)
class Raise:
    """The caller raises this; no other caller is told of it."""

    error: BaseException


Answer: TypeAlias = Go | Wait | NotDone | Raise
