"""All parameter servers of a job, as one: splits by shard, asks all at once, joins the answers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from stratagem.errors import PeerLostError, RemoteError
from stratagem.parameter_server import cut
from stratagem.parameter_server.answers import Committed, Item, Pulled, Pushed
from stratagem.parameter_server.bags import Bags
from stratagem.parameter_server.dtypes import dtype_of
from stratagem.parameter_server.gathered import Gathered, Part
from stratagem.parameter_server.holder import this_process
from stratagem.parameter_server.pending import Pending, as_raised
from stratagem.parameter_server.plan import Spec, Unit
from stratagem.transport.hub import Hub
from stratagem.transport.message import Message
from stratagem.transport.outgoing import Peer, Ticket

_READ_BYTES = 64 << 20  # of one request
_SHARDS = 1 << 20  # more than a variable has: a change of it has a number on each
_SLOWEST = 20e6  # bytes in a second that a server at least draws, writes or reads

__all__ = ["Committed", "Item", "Pending", "Pulled", "Pushed", "Servers", "as_raised"]


class Servers:
    """See the module. Used in the hub's thread.

    Args:
        hub: of this end.
        peers: the servers, by their index.
        job: whose variables these are.
        client: who asks, unique in the job and at each start of the process.
        seconds: deadline of each request.

    Attributes:
        specs: the variables that are known here, by number.
        gathered: small pushes that leave together.
        sent: bytes of arrays by method.
        received: likewise.
    """

    def __init__(
        self, hub: Hub, peers: Sequence[Peer], job: str, client: str, seconds: float = 60.0
    ):
        self.hub, self.peers, self.job, self.client = hub, list(peers), job, client
        self.seconds = seconds
        self.replicated = False  # whether each server's state is on the next one, too
        self.specs: dict[int, Spec] = {}
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.gathered = Gathered(lambda server, *what: self._send(server, "push", *what))
        self._numbers = itertools.count()

    def know(self, specs: Iterable[Spec]) -> None:
        """Learns where variables are that others have created."""
        self.specs.update((spec.vid, spec) for spec in specs)

    # Set-up

    def hello(self, start: bool = False) -> list[dict[str, Any]]:
        """What each server says of itself: `job`, `ready`, `version`, `server`, `snapshots`.

        Args:
            start: a new job begins: what a server holds of another job is gone. Coordinator only.
        """
        try:
            return self._hello(start)
        except PeerLostError:  # one was restarted since it was asked last; all are asked anew
            return self._hello(start)

    def _hello(self, start: bool) -> list[dict[str, Any]]:
        posts = [self.post(s, "hello", self.greeting(s, start)) for s in range(len(self.peers))]
        return [dict(answer.fields) for answer in self.wait(posts)]

    def begin(self, server: int) -> None:
        """As `hello(start=True)`, to one server."""
        self.wait([self.post(server, "hello", self.greeting(server, True))])

    def greeting(self, server: int, start: bool = False) -> dict[str, Any]:
        """The fields of `hello` to a server, but for `job`."""
        fields: dict[str, Any] = {"client": self.client, "start": start, "who": this_process()}
        if self.replicated:
            other = self.peers[(server + 1) % len(self.peers)]
            fields["replica"] = [other.name, other.address]
        return fields

    def create(
        self, specs: Sequence[Spec], starts: Mapping[int, Any], only: int | None = None
    ) -> None:
        """Creates variables on all servers that have a shard; those that exist stay as they are.

        Args:
            specs: where they are.
            starts: by variable: how it starts (`initial.py`), or its value.
            only: the one server that is asked; None for all.
        """
        self.know(specs)
        posts = []
        for server in self._which(only):
            here = [spec for spec in specs if spec.held_by(server)]
            arrays: list[np.ndarray] = []
            told = [[s.vid, _start(s, starts[s.vid], server, arrays)] for s in here]
            fields = {"specs": [s.wire() for s in here], "starts": told}
            if here:
                seconds = self._long(server, here)
                posts.append(self.post(server, "create", fields, arrays, seconds))
        self.wait(posts)

    def install(self, units: Sequence[Unit], only: int | None = None) -> None:
        """Gives each server, or the only one, the units of which it holds a shard."""
        posts = []
        for server in self._which(only):
            here = [u.wire() for u in units if self.specs[u.vids[0]].held_by(server)]
            if here:
                posts.append(self.post(server, "install", {"units": here}))
        self.wait(posts)

    def delete(self, vids: Sequence[int]) -> None:
        """Removes variables and their units."""
        self._ask_all("delete", {"vids": list(vids)})
        for vid in vids:
            self.specs.pop(vid, None)

    # Values

    def pull(
        self, whole: Sequence[Spec] = (), rows: Sequence[tuple[Spec, np.ndarray]] = (),
        rooms: Sequence[int] | None = None, bags: Sequence[Bags | None] = (),
    ) -> Pulled:  # fmt: skip
        """Values of variables, and rows of tables. Raises as `Pending.result`.

        Args:
            whole: variables.
            rows: tables, each with sorted ids, no id twice.
            rooms: how long the arrays of rows are, with zeros at the end; None: as the ids.
            bags: for each table bags of its ids, whose sums come instead; None: rows do.
        """
        self.know([*whole, *(spec for spec, _ in rows)])
        asked = cut.Pull(len(self.peers), whole, rows, rooms, bags)
        servers = asked.servers()
        answers = self.wait([self.post(s, "pull", *asked.request(s)) for s in servers])
        versions: list[int | None] = [None] * len(self.peers)
        for server, answer in zip(servers, answers, strict=True):
            versions[server] = answer.fields["version"]
        found = {s: a.arrays for s, a in zip(servers, answers, strict=True)}
        return Pulled(*asked.join(found), versions)

    def read(self, spec: Spec, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows of a variable, an array of its own; of a scalar its value."""
        stop = spec.rows if stop is None else stop
        if not 0 <= start <= stop <= spec.rows:
            raise ValueError(
                f"variable {spec.name!r}: expected a range of its {spec.rows} rows. Got {start} "
                f"to {stop}."
            )
        out = np.empty((stop - start, *spec.shape[1:]), dtype_of(spec.dtype))
        step = max(1, _READ_BYTES // max(1, spec.row_bytes))
        waiting: list[tuple[int, int, Ticket]] = []

        def finish() -> None:
            first, last, ticket = waiting.pop(0)
            (answer,) = self.wait([ticket])
            out[first - start : last - start] = answer.arrays[0]

        for index, first, last in cut.pieces(spec, start, stop, step):
            fields = {"vid": spec.vid, "shard": index, "start": first, "stop": last}
            waiting.append((first, last, self.post(spec.shards[index].server, "read", fields)))
            if len(waiting) > len(self.peers) + 1:
                finish()
        while waiting:
            finish()
        return out if spec.shape else out.reshape(())

    def assign(
        self, spec: Spec, op: str, value: Any, rows: np.ndarray | tuple[int, int] | None = None,
        token: tuple[int, int] | None = None, only: int | None = None,
    ) -> None:  # fmt: skip
        """Changes values; see `Store.assign`.

        Args:
            spec: the variable.
            op: "set", "add", "sub", "mul", "div", "min" or "max".
            value: `[rows, ...]`.
            rows: a range, or numbers in any order; None: all.
            token: number of the change, and the lowest number at work: the same change with the
                same number is made once. None for the next number.
            only: the one server that is asked; None for all.
        """
        value = np.ascontiguousarray(value, dtype_of(spec.dtype)).reshape(np.shape(value))
        posts: list[Ticket] = []
        change, below = token or (next(self._numbers),) * 2
        for index, where, part in cut.assignment(spec, value, rows):
            if only not in (None, spec.shards[index].server):
                continue
            arrays = [part]
            if isinstance(where, np.ndarray):
                arrays.append(where)
            fields = {
                "vid": spec.vid, "shard": index, "op": op,
                "rows": 1 if isinstance(where, np.ndarray) else where,
                "token": [self.client, change * _SHARDS + index, below * _SHARDS],
            }  # fmt: skip
            posts.append(self.post(spec.shards[index].server, "assign", fields, arrays))
        self.wait(posts)

    # Updates

    def push(
        self, closure: int, below: int, items: Sequence[Item],
        pulled: Sequence[int | None] | None = None, round: int | None = None,
        staged: Sequence[int | str] | None = None, weight: float = 1.0,
    ) -> Pushed:  # fmt: skip
        """Applies or stages a closure's changes, once; see `Store.push` and `Pending`."""
        return self.post_push(closure, below, items, pulled, round, staged, weight).result()

    def post_push(
        self, closure: int, below: int, items: Sequence[Item],
        pulled: Sequence[int | None] | None = None, round: int | None = None,
        staged: Sequence[int | str] | None = None, weight: float = 1.0,
    ) -> Pending[Pushed]:  # fmt: skip
        """As `push`, without waiting."""
        told = cut.Push(len(self.peers))
        for item in items:
            told.add(self.specs[item.unit.vids[0]], item.unit.uid, item.rows, item.handed)
        posts: list[Part] = []
        for server in range(len(self.peers)):
            changes, arrays = told.request(server)
            # A round's commit asks every server for all of its closures.
            if not changes and round is None:
                continue
            fields = {
                "closure": closure, "below": below, "items": changes, "round": round,
                "pulled": None if pulled is None else pulled[server], "weight": weight,
                "staged": None if staged is None else list(staged),
            }  # fmt: skip
            posts.append(self.gathered.add(server, fields, arrays))

        def join(answers: Sequence[Message]) -> Pushed:
            every = [answer.fields for answer in answers]
            return Pushed(
                any(f["applied"] for f in every),
                [f["staleness"] for f in every],
                any(f["late"] for f in every),
            )

        return Pending(self, posts, join)

    def commit(
        self, round: int, closures: Sequence[int], weights: Sequence[float] | None = None,
        mean: bool = True,
    ) -> Committed:  # fmt: skip
        """Applies on all servers what exactly these closures staged; see `Store.commit`."""
        fields = {
            "round": round, "closures": list(closures), "mean": mean,
            "weights": None if weights is None else list(weights),
        }  # fmt: skip
        said = self._ask_all("commit", fields)
        missing = sorted({closure for one in said for closure in one["missing"]})
        return Committed(not missing, missing, max(one["dropped"] for one in said))

    # Recovery

    def snapshot(
        self, number: int, keep_from: int, seconds: float | None = None
    ) -> list[dict[str, Any]]:
        """Each server writes its state; `number`, `bytes`, `version`, `seconds` of each.

        Args:
            number: larger than those before it.
            keep_from: snapshots before this one are removed: the last that was complete on all.
            seconds: deadline; None: as long as the variables' size may take.
        """
        fields = {"number": number, "keep_from": keep_from}
        known = self.specs.values()
        posts = [
            self.post(s, "snapshot", fields, (), seconds or self._long(s, known))
            for s in range(len(self.peers))
        ]
        return [dict(answer.fields) for answer in self.wait(posts)]

    def restore(
        self, number: int, specs: Sequence[Spec], units: Sequence[Unit],
        servers: Sequence[int] | None = None, seconds: float | None = None,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Servers read their rows from a snapshot, of any number of servers; `version`.

        Raises:
            CorruptBackupError: it is damaged. BackupMismatchError: it is of other variables, or
                of another job. BackupError: rows are in none of its files.
        """
        self.know(specs)
        fields = {
            "number": number, "specs": [s.wire() for s in specs], "units": [u.wire() for u in units]
        }  # fmt: skip
        every = range(len(self.peers)) if servers is None else servers
        posts = [
            self.post(s, "restore", fields, (), seconds or self._long(s, specs)) for s in every
        ]
        return [dict(answer.fields) for answer in self.wait(posts)]

    def recover(self, server: int, seconds: float | None = None) -> dict[str, Any]:
        """A server that is empty takes its state back from the one that replicates it.

        Raises:
            BackupError: no other server has all of it.
        """
        seconds = seconds or self._long(server, self.specs.values())
        (answer,) = self.wait([self.post(server, "recover", {}, (), seconds)])
        return dict(answer.fields)

    def post_snapshot(
        self, number: int, keep_from: int, seconds: float, done: Callable[[Any], None]
    ) -> None:
        """As `snapshot`, without waiting; `done` is called for each server: answer or error."""
        fields = {"job": self.job, "number": number, "keep_from": keep_from}
        for peer in self.peers:
            peer.post(
                "snapshot", fields, seconds=seconds, done=lambda result: done(as_raised(result))
            )

    def status(self) -> list[dict[str, Any]]:
        """Numbers of each server; see `Store.status`."""
        return self._ask_all("status", {})

    def stop(self) -> None:
        """Ends the servers' programs."""
        self._ask_all("stop", {})

    # Inside

    def wait(self, tickets: Sequence[Ticket | Part]) -> list[Message]:
        """Answers of requests, errors as who called can catch them."""
        self.gathered.flush()
        try:
            answers = self.hub.wait(tickets)
        except RemoteError as e:
            known = as_raised(e)
            if known is e:
                raise
            raise known from e
        for ticket, answer in zip(tickets, answers, strict=True):
            self.received[ticket.method] += sum(array.nbytes for array in answer.arrays)
        return answers

    def _long(self, server: int, specs: Iterable[Spec]) -> float:
        """The deadline of work on all rows that a server has of some variables."""
        shards = ((spec, shard) for spec in specs for shard in spec.shards)
        sizes = (s.row_bytes * (h.stop - h.start) for s, h in shards if h.server == server)
        return self.seconds + sum(sizes) / _SLOWEST

    def _which(self, only: int | None) -> Sequence[int]:
        return range(len(self.peers)) if only is None else [only]

    def _ask_all(
        self, method: str, fields: Mapping[str, Any], seconds: float | None = None
    ) -> list[dict[str, Any]]:
        posts = [self.post(s, method, fields, (), seconds) for s in range(len(self.peers))]
        return [dict(answer.fields) for answer in self.wait(posts)]

    def post(
        self, server: int, method: str, fields: Mapping[str, Any],
        arrays: Sequence[np.ndarray] = (), seconds: float | None = None,
    ) -> Ticket:  # fmt: skip
        """Asks a server for something, after what it was asked for before."""
        self.gathered.flush()
        return self._send(server, method, fields, arrays, seconds)

    def _send(
        self, server: int, method: str, fields: Mapping[str, Any],
        arrays: Sequence[np.ndarray] = (), seconds: float | None = None,
    ) -> Ticket:  # fmt: skip
        self.sent[method] += sum(array.nbytes for array in arrays)
        return self.peers[server].post(
            method, {"job": self.job, **fields}, arrays,
            seconds=self.seconds if seconds is None else seconds,
        )  # fmt: skip


def _start(spec: Spec, start: Any, server: int, arrays: list[np.ndarray]) -> Any:
    """How a variable starts, as plain data; adds the arrays that it names."""
    if isinstance(start, Mapping):
        return dict(start)
    value = np.ascontiguousarray(start, dtype_of(spec.dtype)).reshape(np.shape(start))
    if value.shape != spec.shape:
        raise ValueError(
            f"variable {spec.name!r}: expected a value of shape {spec.shape}. Got {value.shape}."
        )
    places = []
    for index in spec.held_by(server):
        shard = spec.shards[index]
        places.append([index, len(arrays)])
        arrays.append(value[shard.start : shard.stop] if spec.shape else value)
    return {"kind": "value", "places": places}
