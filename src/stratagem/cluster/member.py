"""This process's part in a job that can lose and gain processes; the other end is `hosting.py`.

A step that waits for other processes waits in native code, where nothing reaches it: no signal, no
news that a peer is dead, and Gloo does not always notice that itself. So a step runs in a thread
of its own, and the program waits for it in Python (`Member.run`). When the job changes, the step is
left behind, with the devices it runs on, and the program goes on with new ones
(`cluster/regroup.py`). Nobody else waits for what is left behind.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NoReturn, TypeVar

from stratagem.cluster.greeting import greet
from stratagem.cluster.keys import Key
from stratagem.cluster.membership import PEER_LOST, Beat, Terms
from stratagem.cluster.messages import encode
from stratagem.cluster.step_thread import Call, StepThread, await_all, may_tell_of_a_loss
from stratagem.errors import GroupChangedError, PeerTimeoutError

_BEAT_SECONDS = 1.0
# A step that fails may fail because of a process whose end is not announced yet.
_NEWS_SECONDS = 5.0

_log = logging.getLogger("stratagem")

T = TypeVar("T")


@dataclass(frozen=True)
class Generation:
    """The processes that train together until the next change.

    Args:
        number: from 0.
        members: their tasks, in the order of their ranks.
        service: the address of JAX's coordination service for them.
        why: what made them change.
    """

    number: int
    members: tuple[str, ...]
    service: str
    why: str


class Member:
    """One process of a job. Made by `connect`.

    Args:
        line: the connection to the service.
        host: of the service.
        task: this process, such as "worker 1".
        end: ends this process: gets the reason, and whether to show where its threads are.
        received: what has come on the connection and was not read yet.
    """

    def __init__(
        self,
        line: socket.socket,
        host: str,
        task: str,
        end: Callable[[str, bool], None] | None = None,
        received: bytes = b"",
    ):
        self.task = task
        self.terms = Terms()
        self.finished = 0  # Steps of this generation that have finished here.
        self._line, self._host, self._received = line, host, bytearray(received)
        self._end = end or end_process
        self._news = threading.Condition()
        self._sending = threading.Lock()
        self._latest: Generation | None = None
        self._current: Generation | None = None
        self._thread: StepThread | None = None
        self._beat, self._since = Beat(), time.monotonic()
        self._closed = False
        self._ended: set[str] = set()  # tasks whose programs have come to their end
        self._dismissed = ""  # why this process is not needed any more
        self.others_wait = False  # Tasks wait to be admitted.
        self._left_behind: list[StepThread] = []
        self._watching = threading.Thread(target=self._watch, name="stratagem-member", daemon=True)
        self._watching.start()

    @classmethod
    def connect(
        cls,
        address: str,
        task: str,
        rank: int,
        terms: Terms,
        seconds: float,
        end: Callable[[str, bool], None] | None = None,
        key: Key | None = None,
    ) -> Member:
        """Says hello to a job's service: this process is ready to train.

        Args:
            address: of the service.
            task: this process, such as "worker 1".
            rank: its place among the tasks of the job.
            terms: what the user allows.
            seconds: how long to try.
            end: ends this process: gets the reason, and whether to show where its threads are.
            key: of the job.

        Raises:
            PeerTimeoutError: the service does not answer.
            JobMismatchError: it has another key.
        """
        hello = {"task": task, "rank": rank, "terms": asdict(terms)}
        line, received = greet(address, hello, seconds, key or Key())
        host = address.rpartition(":")[0]
        member = cls(line, host, task, end, received)
        member.terms = terms
        return member

    def await_change(self, seconds: float) -> Generation:
        """Waits for a generation that this process has not joined yet.

        Raises:
            PeerTimeoutError: none was announced in time.
            SystemExit: with 0; the others have come to their end without this process.
        """
        with self._news:
            came = self._news.wait_for(lambda: self._is_announced or self._dismissed, seconds)
            if self._dismissed:
                print(f"stratagem: {self.task} is not needed: {self._dismissed}.", file=sys.stderr)
                sys.exit(0)
            if not came or not self._latest:
                raise PeerTimeoutError(
                    f"Expected the tasks of the job to be there within {seconds:g} s (this is "
                    f"{self.task}). Not all have said hello to its coordination service. Look "
                    "which task has not started."
                )
            return self._latest

    @property
    def _is_announced(self) -> bool:
        return self.has_changed and self._latest is not None and not self.is_held

    @property
    def is_held(self) -> bool:
        """Whether too few are left, and a replacement is awaited."""
        return self._latest is not None and not self._latest.members

    @property
    def has_changed(self) -> bool:
        """Whether the members are others than those that this process has joined."""
        return self._latest is not self._current

    def admit(self) -> None:
        """Lets those that wait join, and waits for the change. For who is where they can begin."""
        with self._news:
            self.others_wait = True  # another process may have heard it before this one
        self._send("admit", None)
        with self._news:
            self._news.wait_for(lambda: self.has_changed or not self.others_wait)

    def give_up(self, why: str) -> None:
        """Ends this process, which cannot go on with others, as if a peer were lost."""
        self._end(why, False)

    def joined(self, generation: Generation) -> None:
        """This process computes with the members of a generation from now on."""
        with self._news:
            self._current, self.finished = generation, 0
            self._set(Beat())
        self._send("joined", generation.number)

    def run(self, step: Callable[[], T], doing: str) -> T:
        """Runs a step: what all members do in the same order, and waits for other processes.

        Args:
            step: gets all its arguments from where it is made. It may be left behind, still
                running, and so may destroy (donate) nothing that is needed later.
            doing: what it is, in words, for who is told that it does not finish.

        Returns:
            What it returns, computed: nothing in it is still to be waited for.

        Raises:
            GroupChangedError: other processes were lost, or join. It has no result here, and may
                have one elsewhere.
        """
        if self._thread is not None and self._thread.is_this():
            return step()
        with self._news:
            self.raise_if_changed()
            self._set(Beat(self._beat.step + 1, True, 0.0, doing))
            try:
                job = self._wait(step, lambda: self.has_changed)
                if not job.done:
                    self.raise_if_changed()
                if may_tell_of_a_loss(job.error):
                    self._news.wait_for(lambda: self.has_changed or self._ended, _NEWS_SECONDS)
                    self.raise_if_changed()
                    self._end_if_alone(doing, job.error)
            finally:
                self._set(Beat(self._beat.step, False, 0.0, doing))
            if job.error is not None:
                raise job.error
            self.finished += 1
            self._clean_up()
            return job.result

    def _end_if_alone(self, doing: str, error: BaseException | None) -> None:
        """Ends this process where a step fails because others' programs have come to their end."""
        if self._ended:
            self._end(
                f"Expected all processes to take part in {doing}. {', '.join(sorted(self._ended))}:"
                " the program has ended. Every process must make the same calls in the same order, "
                f"and as many {self._me()}. It failed with: {error}",
                True,
            )

    def _me(self) -> str:
        """Who this is and what it does, for a text."""
        beat, seconds = self._beat, time.monotonic() - self._since
        if not beat.step:
            return f"(this is {self.task})"
        where = "in" if beat.busy else "outside of any step after"
        return (
            f"(this is {self.task}, {where} step {beat.step} since the last change, {beat.doing}, "
            f"for {seconds:.0f} s)"
        )

    def _clean_up(self) -> None:
        """After the first step on new devices: JAX keeps the old ones, and a dozen threads, in
        reference cycles. It takes some tenths of a second, for which nobody should wait before."""
        if self.finished == 1 and self._current is not None and self._current.number:
            gc.collect()

    def meet(self, connect: Callable[[], T], generation: Generation) -> T | None:
        """Runs what waits for the members of a new generation; None once there is a newer one."""
        with self._news:
            job = self._wait(connect, lambda: self._latest is not generation)
            if job.error is not None:
                raise job.error
            return job.result

    def _wait(self, call: Callable[[], Any], enough: Callable[[], bool]) -> Call:
        """Until a call in the thread is done, or leaves it behind once that is `enough`."""
        if self._thread is None:
            self._thread = StepThread(self._news)
        job = self._thread.submit(call)
        try:
            self._news.wait_for(lambda: job.done or enough())
        finally:  # Also when a signal's handler raises.
            if not job.done:
                self._thread.abandon()
                self._left_behind.append(self._thread)
                self._thread = None
        return job

    def close(self, error: str | None = None) -> None:
        """Says goodbye; ends the threads, except those that are stuck.

        Args:
            error: why the program ends here, where it did not come to its end.
        """
        self._closed = True  # What is said to the others is not for this process any more.
        self._send("bye", error)
        rank = self._current.members.index(self.task) if self._current else 0
        await_all(self._left_behind, rank)
        with self._news:
            if self._thread is not None:
                self._thread.abandon()
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
        self._watching.join()
        self._line.close()

    def raise_if_changed(self) -> None:
        """Raises GroupChangedError where the processes are others than this one joined."""
        if self._latest is not None and self.has_changed:
            raise GroupChangedError(
                f"The processes of the job have changed: {self._latest.why}. Now: "
                f"{', '.join(self._latest.members) or 'too few'} (this is {self.task})."
            )

    def _set(self, beat: Beat) -> None:
        self._beat, self._since = beat, time.monotonic()

    def _send(self, kind: str, said: Any) -> None:
        with contextlib.suppress(OSError):  # The watch sees the end of the connection.
            with self._sending:
                self._line.sendall(encode(kind, said))

    def _watch(self) -> None:
        """In a thread: beats, and hears what the service says."""
        self._line.settimeout(_BEAT_SECONDS)
        buffer, silence = self._received, 0.0
        while True:
            with self._news:
                beat = Beat(
                    self._beat.step, self._beat.busy, time.monotonic() - self._since,
                    self._beat.doing,
                )  # fmt: skip
            self._send("beat", asdict(beat))
            while (at := buffer.find(b"\n")) >= 0:
                message, buffer[: at + 1] = json.loads(buffer[:at]), b""
                self._hear(message["kind"], message["said"])
            try:
                data = self._line.recv(1 << 16)
            except TimeoutError:
                silence += _BEAT_SECONDS  # By no clock: this process may have been stopped itself.
                if silence < self.terms.silence_seconds:
                    continue
                self._end(
                    f"{self.task}: no sign of life from the job's coordination service at "
                    f"{self._host} for {silence:.0f} s: it is stopped, or the link to it is cut "
                    f"{self._me()}.",
                    False,
                )
                return
            except OSError:
                data = b""
            silence = 0.0
            if self._closed:
                return
            if not data:
                gone = f"{self.task}: the job's coordination service at {self._host} is gone"
                self._end(f"{gone} {self._me()}.", False)
                return
            buffer += data

    def _hear(self, kind: str, said: Any) -> None:
        if kind == "beat" or self._closed:
            return
        if kind == "end":
            self._end(f"{said['why']} {self._me()}.", self.task in said.get("dump", ()))
            return
        if kind == "warn":
            _log.warning("%s (this is %s).", said, self.task)
            return
        if kind == "left":
            with self._news:
                self._ended.add(said)
                self._news.notify_all()
            return
        if kind in ("await", "dismiss"):
            with self._news:
                self.others_wait = kind == "await" and bool(said["tasks"])
                self._dismissed = said.get("why", "")
                self._news.notify_all()
            return
        if kind == "hold":
            with self._news:
                self._latest = Generation(-1, (), "", said["why"])
                self._news.notify_all()
            return
        members = tuple(said["members"])
        if self.task not in members and self._latest is None:
            return  # it waits to be admitted
        if self.task not in members:
            why = f"{self.task}: the others go on without it: {said['why']}"
            self._end(f"{why} {self._me()}.", True)
            return
        with self._news:
            # At the host at which it was found: what it listens at may be no address ("0.0.0.0").
            service = f"{self._host}:{said['port']}"
            self.others_wait = False
            self._latest = Generation(said["number"], members, service, said["why"])
            self._news.notify_all()


def end_process(why: str, dump: bool) -> NoReturn:
    """Ends this process at once: its main thread may be anywhere, and never come back."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if dump:
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            stack = "".join(traceback.format_stack(frame))
            print(
                f"stratagem: this process is here (most recent call last):\n{stack}",
                end="",
                file=sys.stderr,
            )
        print(f"stratagem: {why}", file=sys.stderr, flush=True)
    os._exit(PEER_LOST)
