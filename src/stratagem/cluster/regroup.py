"""Going on with other processes: the same program, new devices, the state it had.

For each generation of the job there is a new coordination service, and new devices in each process
that stays. That is the same work whether a process is lost or joins, takes some tens of
milliseconds besides compiling, and needs nothing of what the lost one has left behind (Gloo keeps
the broken connections of a group for as long as the devices live, and would use them again).
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from stratagem import _jax
from stratagem.cluster.channel import Stream
from stratagem.cluster.member import Generation, Member
from stratagem.errors import PeerTimeoutError


@dataclass(frozen=True)
class Progress:
    """Where the processes go on from.

    Args:
        step: the last step that all survivors have finished.
        source: rank of a survivor; it has what the others may need.
        newcomers: ranks that have no state yet.
    """

    step: int
    source: int
    newcomers: tuple[int, ...]


def join(member: Member, seconds: float) -> tuple[Generation, _jax.JobStore]:
    """Joins the latest generation, at the start and after `GroupChangedError`.

    Every member calls it. JAX's devices are other ones afterwards: what was over several processes
    can still be read, by `addressable_data`, and is to be laid out anew.

    Args:
        member: this process.
        seconds: deadline for all members to be there.

    Returns:
        The generation, and its key-value store.

    Raises:
        PeerTimeoutError: the others did not come in time.
    """
    deadline = time.monotonic() + seconds
    while True:
        generation = member.await_change(max(0.0, deadline - time.monotonic()))
        rank, size = generation.members.index(member.task), len(generation.members)
        left = max(1.0, deadline - time.monotonic())
        _jax.leave_job()
        try:
            client = member.meet(
                functools.partial(_jax.connect, generation.service, rank, left),
                generation,
            )
        except RuntimeError as error:
            raise PeerTimeoutError(
                f"Expected {', '.join(generation.members)} to come together within {seconds:g} s "
                f"after: {generation.why} (this is {member.task}). Not all did. One may be busy "
                "outside of a step for longer than that, or not reach the service at "
                f"{generation.service}. JAX says: {error}"
            ) from None
        if client is None:
            continue  # One more was lost, or has come, while this one waited for all.
        member.joined(generation)
        store = _jax.use_client(client, generation.service, size, rank)
        # Last: another thread (that writes a backup) may start the new devices at any time.
        _jax.forget_backends()
        return generation, store


def agree(stream: Stream, finished: int | None) -> Progress:
    """Where to go on from. Every member of a new generation calls it, once, first.

    Args:
        stream: of the new generation's channel.
        finished: how many steps this process has finished since the job began; None for one that
            has just come.

    Raises:
        PeerTimeoutError: names the processes that did not come.
        RuntimeError: no survivor is left, or survivors are more than one step apart, which the
            collectives of a step rule out.
    """
    payload = json.dumps(finished).encode()
    said = [json.loads(part) for part in stream.all_gather(payload, "the last finished step")]
    return progress(said)


def progress(finished: Sequence[int | None]) -> Progress:
    """`agree`, once it is known what all have said, by rank."""
    steps = {rank: step for rank, step in enumerate(finished) if step is not None}
    if not steps:
        raise RuntimeError(
            "Expected at least one process that has the state of the training. Got only new ones: "
            "all others were lost at once. Start the job again from its last backup."
        )
    least = min(steps.values())
    if max(steps.values()) - least > 1:
        raise RuntimeError(
            f"Expected survivors that differ by one step at most. Got finished steps {steps} by "
            "rank. A step without a collective in it cannot be recovered: start the job again from "
            "its last backup."
        )
    source = min(rank for rank, step in steps.items() if step == least)
    newcomers = tuple(rank for rank, step in enumerate(finished) if step is None)
    return Progress(least, source, newcomers)
