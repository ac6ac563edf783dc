"""A training loop that goes on when processes are lost or join; not yet behind a strategy.

Arguments: address of the service, index of this worker, folder for progress, and what this worker
does after `BEFORE` steps: "go", "hang", "stop"; "oversleep" after as many more. "join" comes late.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import stratagem  # noqa: F401  (chooses the backend of Keras)
from stratagem.cluster import regroup
from stratagem.cluster.channel import Channel
from stratagem.cluster.member import Member
from stratagem.cluster.membership import Terms
from stratagem.errors import GroupChangedError

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jobs import report

ROWS, RATE, BEFORE, AFTER = 6, 0.1, 10, 20
SECONDS = 60.0
X = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")
Y = X @ np.array([1.0, -2.0, 0.5], "float32")


def alone(steps: int) -> np.ndarray:
    """The weights after some steps of one process."""
    w = np.zeros(3, "float32")
    for _ in range(steps):
        w -= RATE * 2 * X.T @ (X @ w - Y) / ROWS
    return w


class Group:
    """The step and the layout of one generation."""

    def __init__(self, rank: int, size: int):
        mesh = Mesh(np.array(jax.devices()), ("replica",))
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        split = NamedSharding(mesh, PartitionSpec("replica"))
        rows = np.arange(ROWS)
        own = rows % size == rank  # The rows are dealt anew; a mask keeps the parts of one size.
        mask = jax.make_array_from_process_local_data(split, own[None].astype("float32"))

        def step(w: Any, mask: Any) -> Any:
            error = (X @ w - Y) * mask[0]
            return w - RATE * jax.lax.psum(2 * X.T @ error / ROWS, "replica")

        def share(w: Any, mask: Any) -> Any:
            del mask
            return jax.lax.psum(w[0], "replica")

        def compiled(fn: Any, state: Any) -> Any:
            mapped = jax.shard_map(
                fn, mesh=mesh, in_specs=(state, PartitionSpec("replica")),
                out_specs=PartitionSpec(), check_vma=False,
            )  # fmt: skip
            jitted = jax.jit(mapped)
            return lambda w: jitted(w, mask)

        self.step = compiled(step, PartitionSpec())
        self._share = compiled(share, PartitionSpec("replica"))
        self._split = split

    def place(self, w: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(self._everywhere, w)

    def from_source(self, w: np.ndarray) -> jax.Array:
        """The sum of all; only the source brings something."""
        return self._share(jax.make_array_from_process_local_data(self._split, w[None]))


def oversleep() -> None:
    time.sleep(1000)


def misbehave(how: str, folder: Path, index: int) -> None:
    (folder / f"{index}.{how}").touch()  # what the test waits for
    if how in ("hang", "oversleep"):
        oversleep()
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)


def main() -> None:
    address, index, folder, how = sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4]
    terms = Terms(min_workers=1, stall_seconds=8.0, silence_seconds=5.0)
    member = Member.connect(address, f"worker {index}", int(index), terms, SECONDS)
    newcomer = how == "join"
    state: dict[int, np.ndarray] = {} if newcomer else {0: np.zeros(3, "float32")}
    done, end, members = (None if newcomer else 0), None, []
    group, w, before = None, None, None
    while end is None or done < end:
        try:
            if group is None or member.has_changed:
                if w is not None:  # The step in flight is lost; the one before it may be needed.
                    state = {done: np.asarray(w.addressable_data(0))}
                if before is not None:
                    state[done - 1] = np.asarray(before.addressable_data(0))
                group = w = before = None
                generation, store = regroup.join(member, SECONDS)
                rank = generation.members.index(member.task)
                names = list(generation.members)
                stream = Channel(store, rank, names, SECONDS).stream("recover")
                found = regroup.agree(stream, done)
                group = Group(rank, len(names))
                mine = state[found.step] if rank == found.source else np.zeros(3, "float32")
                w = member.run(lambda g=group, m=mine: g.from_source(m), "handing over the state")
                done, before = found.step, None
                members.append(len(names))
                if len(members) == 3 or newcomer:
                    end = done + AFTER
                (folder / f"{index}.generation{generation.number}").touch()
            if member.others_wait:
                member.admit()
            # Nothing is donated: what goes in is still there if the step fails.
            new = member.run(lambda g=group, v=w: g.step(v), f"training step {done + 1}")
            before, w, done = w, new, done + 1
        except GroupChangedError:
            continue
        if done == BEFORE * (2 if how == "oversleep" else 1):
            misbehave(how, folder, int(index))
    report(
        {
            "steps": done,
            "members": members,
            "w": np.asarray(jnp.asarray(w.addressable_data(0))).tolist(),
        }
    )
    member.close()


if __name__ == "__main__":
    main()
