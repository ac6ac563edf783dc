"""The worker task: executes closures, and knows no user's code but dataset functions.

Two threads. One keeps the connection to the coordinator, so that it hears from this worker while
a closure computes; the other computes, with connections of its own to the parameter servers.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np

from stratagem.coordinator.held import Pushing, Variant
from stratagem.coordinator.per_worker import Elements, Ended, Taken, variant_key
from stratagem.coordinator.replies import Replies, Reply, as_array, failure, outcome
from stratagem.errors import JobMismatchError, MalformedMessageError, NotReadyError
from stratagem.parameter_server.client import Item, Servers
from stratagem.parameter_server.link import OUT_OF_REACH
from stratagem.parameter_server.plan import Spec
from stratagem.step.parts import Parts
from stratagem.transport import several
from stratagem.transport.hub import Hub
from stratagem.transport.message import Message

_PULL_SECONDS = 30.0
_ASKED_SECONDS = 5.0  # in which servers say whose they are
_TURN_SECONDS = 0.5
# Functions whose programs stay; others are sent again. More than it has in hand at a time.
_KEPT = 64
_SLICE_SECONDS = 0.001  # for which closures are done before answers are looked for

_log = logging.getLogger("stratagem")


class Worker:
    """One worker task.

    Args:
        address: where it listens, "host:port".
        name: how others name it, such as "worker 0".
        key: of the job.
    """

    def __init__(self, address: str, name: str, key: Any):
        self._hub = Hub(name, key)
        self._hub.listen(address, self._serve)
        self._answers: deque[tuple[Any, Message | BaseException]] = deque()
        self._rung = False  # it will look at the answers
        self._stopping = False
        self._computer = _Computer(name, key, self._answer)
        self._thread = threading.Thread(
            target=self._computer.run, name=f"{name} computes", daemon=True
        )
        self._thread.start()

    def serve(self) -> None:
        """Serves until the coordinator, or `stop`, ends it."""
        try:
            while not self._stopping:
                self._hub.turn(1.0)
                self._rung = False
                with self._hub.together():
                    while self._answers:
                        self._reply(*self._answers.popleft())
            self._hub.turn(0.0)  # sends the answer to what ended it
        finally:
            self._computer.put(None)
            self._thread.join(5.0)  # it may be in the middle of a closure, which nobody waits for
            self._hub.close()

    def stop(self) -> None:
        """Ends `serve`; from a signal handler too."""
        self._stopping = True
        self._hub.wake()

    def _serve(self, request: Any) -> Message | None:
        if request.method in ("stop", "cancel"):
            self._computer.check(request)
        if request.method == "stop":
            self._stopping = True
            return Message("stopped", {}, ())
        if request.method == "cancel":
            self._computer.cancelled.add(request.fields["closure"])
            return Message("cancelled", {}, ())
        self._computer.put(request)
        return None

    def _reply(self, request: Any, answer: Message | BaseException) -> None:
        if not isinstance(answer, Message):
            request.fail(answer)
            return
        try:
            request.answer(answer)
        except MalformedMessageError as error:  # the coordinator was told instead
            _log.warning("%s: an answer could not be sent: %s", self._hub.name, error)

    def _answer(self, request: Any, answer: Message | BaseException) -> None:
        self._answers.append((request, answer))
        if not self._rung:
            self._rung = True
            self._hub.wake()


class _Computer:
    """What runs in the thread that computes.

    It does not wait until what a closure pushes has arrived: it begins the next one, and answers
    when it has. Servers take what one worker sends in its order, so that the next one pulls what
    this one has pushed, as if it had waited.

    Args:
        name: of the task.
        key: of the job.
        answer: hands the answer of a request to the other thread.

    Attributes:
        cancelled: closures that need not be begun.
    """

    def __init__(self, name: str, key: Any, answer: Any):
        self._name, self._key, self._answer = name, key, answer
        self.cancelled: set[int] = set()
        self._inbox: deque[Any] = deque()
        self._sleeps = False
        self._hub = Hub(name, key)
        self._servers: Servers | None = None
        self._told: dict[str, Any] = {}
        self._owner = ""  # the hub of the coordinator that has set it up
        self._index = 0  # As the job counts workers: one that was added knows no cluster with it.
        self._staleness = 0  # of the last push
        self._specs: dict[int, Spec] = {}
        self._families: dict[int, dict[str, Variant]] = {}
        self._iterators: dict[int, Elements] = {}
        self._pushing: deque[Pushing] = deque()

    def put(self, request: Any) -> None:
        """Hands a request over; None ends it. The other thread."""
        self._inbox.append(request)
        if self._sleeps:
            self._hub.wake()

    def check(self, request: Any) -> None:
        """Refuses what the coordinator of another job asks for: numbers mean other things there.
        Any thread."""
        if self._owner not in ("", request.client.incarnation):
            raise JobMismatchError(
                f"{self._name}: expected requests of the job {self._told['job']!r}, which has set "
                "this worker up. Got one of another job's coordinator. End one of these programs, "
                "or give it workers and servers of its own."
            )

    def run(self) -> None:
        """Does what comes in, in order."""
        goes_on = True
        while goes_on:
            self._sleeps = True  # before the look: who adds something later wakes the hub
            self._hub.turn(0.0 if self._inbox else _TURN_SECONDS)
            self._sleeps = False
            self._answer_pushed()
            end = self._hub.now() + _SLICE_SECONDS
            with self._hub.together(), self._gathering():
                while goes_on and self._inbox:
                    request = self._inbox.popleft()
                    goes_on = request is not None
                    if goes_on:
                        self._do(request)
                    if self._hub.now() > end:
                        break
        self._hub.close()

    def _gathering(self) -> contextlib.AbstractContextManager[None]:
        """Small pushes of closures that follow each other leave together."""
        servers = self._servers
        return contextlib.nullcontext() if servers is None else servers.gathered.together()

    def _do(self, request: Any) -> None:
        try:
            if request.method != "setup":
                self.check(request)
            answer: Any = getattr(self, _METHODS[request.method])(request)
        except BaseException as error:
            answer = error
        if answer is not None:
            self._answer(request, answer)

    def _answer_pushed(self) -> None:
        """Answers the closures whose pushes have arrived."""
        while self._pushing and self._pushing[0].pushed.done:
            done = self._pushing.popleft()
            answer: Any
            try:
                staleness = max(done.pushed.result().staleness, default=0)
                self._staleness = staleness
                answer = outcome(
                    "ok", variant=done.variant, staleness=staleness, arrays=done.results
                )
            except OUT_OF_REACH as error:
                done.taken.put_back()
                answer = outcome("aborted", reason=str(error))
            except Exception as error:
                answer = failure(error)
            done.reply(answer)

    # Each takes a request and gives its answer, or None: that comes when its push has arrived.

    def _setup(self, request: Any) -> Message:
        """A coordinator begins: what another one left here is forgotten."""
        fields = dict(request.fields)
        if fields == self._told:  # it had lost sight of this worker
            return Message("ready", {}, ())
        hub = Hub(self._name, self._key)
        peers = [hub.connect(address, name) for name, address in fields["servers"]]
        servers = Servers(hub, peers, fields["job"], hub.incarnation, _ASKED_SECONDS)
        try:
            self._check_servers(servers)
        except BaseException:
            hub.close()
            raise
        servers.seconds = _PULL_SECONDS
        self._told, self._index, before = fields, fields["index"], self._hub
        self._hub, self._servers, self._owner = hub, servers, request.client.incarnation
        before.close()
        self._answer_pushed()  # nobody waits for them
        for known in (self._specs, self._families, self._iterators, self.cancelled):
            known.clear()
        return Message("ready", {}, ())

    def _check_servers(self, servers: Servers) -> None:
        """The servers have the last word on which job is the present one: a coordinator that has
        been replaced, and does not know it yet, must not take this worker back."""
        try:
            told = servers.status()
        except OUT_OF_REACH:
            return  # so nothing runs before they are back, and they refuse what they should
        for said in told:
            if said["ready"] and said["job"] != servers.job:
                raise JobMismatchError(
                    f"{self._name}: expected servers of the job {servers.job!r}, whose coordinator "
                    f"sets this worker up. Got ps {said['server']} at work for the job "
                    f"{said['job']!r}. End one of these programs, or give it workers and servers "
                    "of its own."
                )

    def _plan(self, request: Any) -> Message:
        fields = request.fields
        for wire in fields["specs"]:
            spec = Spec.from_wire(wire)
            self._specs[spec.vid] = spec
        if self._servers is not None:
            self._servers.know(self._specs.values())
        parts = Parts.from_wire(fields["parts"], [blob.tobytes() for blob in request.arrays])
        variants = self._families.setdefault(fields["family"], {})
        variants[fields["variant"]] = Variant(fields, parts)
        gone: list[int] = []
        while len(self._families) > _KEPT:  # of the one that was not used for longest
            oldest = self._families.pop(next(iter(self._families)))
            gone += [variant.plan for variant in oldest.values()]
        return Message("planned", {"gone": gone}, ())

    def _iterator(self, request: Any) -> Message:
        number = request.fields["iterator"]
        try:
            if number not in self._iterators:
                (pickled,) = request.arrays
                self._iterators[number] = Elements(pickled.tobytes(), self._index)
            spec = self._iterators[number].spec()
        except StopIteration:
            return Message("ended", {}, ())
        except Exception as error:  # the user's
            return failure(error)
        return Message("opened", {}, (as_array(cloudpickle.dumps(spec)),))

    def _forget(self, request: Any) -> Message:
        for number in request.fields["iterators"]:
            self._iterators.pop(number, None)
        return Message("forgotten", {}, ())

    def _run(self, request: Any) -> None:
        """Closures that came together, in their order; their answers leave together, too."""
        replies = Replies(request, self._answer)
        each = several.split(request.fields["each"], request.arrays)
        for number, (fields, arguments) in enumerate(each):
            reply = functools.partial(replies.put, number)
            answer = self._one(fields, arguments, reply)
            if answer is not None:
                reply(answer)

    def _one(
        self, fields: Mapping[str, Any], arguments: Sequence[np.ndarray], reply: Reply
    ) -> Message | None:
        """The answer to a closure, or None: `reply` is called with it later."""
        closure = fields["closure"]
        if closure in self.cancelled:
            self.cancelled.discard(closure)
            return outcome("aborted", reason="cancelled")
        taken = Taken(self._iterators, fields["iterators"])
        try:
            return self._execute(fields, arguments, taken, reply)
        except Ended as ended:
            taken.put_back()
            return outcome("data-ended", iterator=ended.iterator)
        except OUT_OF_REACH as error:
            taken.put_back()
            return outcome("aborted", reason=str(error))
        except Exception as error:
            return failure(error)

    def _execute(
        self, fields: Mapping[str, Any], arguments: Sequence[np.ndarray], taken: Taken, reply: Reply
    ) -> Message | None:
        servers = self._servers
        if servers is None:
            raise NotReadyError("Expected a setup before a closure. Got none. Connect anew.")
        variants = self._families.pop(fields["family"], None)
        if variants is None:
            return outcome("needs-program", specs=None)
        self._families[fields["family"]] = variants  # last, as the latest in use
        for position, turn in next(iter(variants.values())).elements:
            taken.take(position, turn, fields["at"])
        variant = variants.get(variant_key(taken.elements))
        if variant is None:
            specs = taken.specs()
            taken.put_back()
            return outcome("needs-program", arrays=(as_array(cloudpickle.dumps(specs)),))
        runner, parts = variant.runner, variant.runner.parts
        given = [self._given(g, fields, taken) for g in parts.given]
        wanted = runner.prepare(
            arguments, given, [len(self._specs[t.vid].shards) for t in parts.tables]
        )
        whole: Sequence[np.ndarray] = ()
        rows: Sequence[np.ndarray] = ()
        versions: Any = None
        if parts.whole or parts.tables:
            pulled = servers.pull(
                [self._specs[vid] for vid in parts.whole],
                [(self._specs[t.vid], w.ids) for t, w in zip(parts.tables, wanted, strict=True)],
                [w.padded for w in wanted],
                [w.bags for w in wanted],
            )
            whole, rows, versions = pulled.whole, pulled.rows, pulled.versions
            self._answer_pushed()  # so that the next closure is here when this one is done
        results, local, handed = runner.compute(
            whole, rows, wanted, arguments, given, variant.zeros
        )
        items = [
            Item(variant.units[i["uid"]], i["rows"], variant.handed(i, fields["share"]))
            for i in runner.items(handed, wanted)
        ]
        if not items:
            return outcome("ok", variant=variant.plan, arrays=(*results, *local))
        pushed = servers.post_push(
            fields["token"],
            fields["below"],
            items,
            pulled=versions,
            round=fields["round"],
            staged=variant.staged,
            weight=fields["weight"],
        )
        self._pushing.append(Pushing(reply, pushed, variant.plan, (*results, *local), taken))
        return None

    def _given(self, given: Any, fields: Any, taken: Taken) -> np.ndarray:
        """A value that a program has from its worker; see `primitives.given`."""
        if given.kind == "element":
            position, turn, leaf = given.key
            return taken.elements[position, turn].leaves[leaf]
        if given.kind == "worker":
            return np.asarray(self._index, given.dtype)
        if given.kind == "staleness":  # how late the next push comes is not known: as the last one
            return np.asarray(max(1, self._staleness), given.dtype)
        return np.asarray(fields["closure"] & 0xFFFFFFFF, given.dtype)


_METHODS = {
    "setup": "_setup",
    "plan": "_plan",
    "iterator": "_iterator",
    "forget": "_forget",
    "run": "_run",
}
