"""This process's part in a job that can lose and gain processes; the other end is `hosting.py`.

A step that waits for other processes waits in native code, where nothing reaches it: no signal, no
news that a peer is dead, and Gloo does not always notice that itself. So a step runs in a thread
of its own, and the program waits for it in Python (`Member.run`). When the job changes, the step is
left behind, with the devices it runs on, and the program goes on with new ones
(`cluster/regroup.py`). Nobody else waits for what is left behind.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np

from stratagem.cluster.membership import Beat, Terms
from stratagem.errors import GroupChangedError, PeerTimeoutError

PEER_LOST = 43
"""Exit code of a process that ends because it waited for another one in vain."""

_BEAT_SECONDS = 1.0
_CONNECT_RETRY_SECONDS = 0.05
# A step that fails may fail because of a process whose end is not announced yet.
_NEWS_SECONDS = 5.0
_STATUS = re.compile(r"[A-Z_]+: ")

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
    """

    def __init__(
        self,
        line: socket.socket,
        host: str,
        task: str,
        end: Callable[[str, bool], None] | None = None,
    ):
        self.task = task
        self.terms = Terms()
        self.finished = 0  # Steps of this generation that have finished here.
        self._line, self._host = line, host
        self._end = end or _end_process
        self._news = threading.Condition()
        self._sending = threading.Lock()
        self._latest: Generation | None = None
        self._current: Generation | None = None
        self._thread: _Runner | None = None
        self._beat, self._since = Beat(), time.monotonic()
        self._closed = False
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
    ) -> Member:
        """Says hello to a job's service: this process is ready to train.

        Args:
            address: of the service.
            task: this process, such as "worker 1".
            rank: its place among the tasks of the job.
            terms: what the user allows.
            seconds: how long to try.
            end: ends this process: gets the reason, and whether to show where its threads are.

        Raises:
            PeerTimeoutError: the service does not answer.
        """
        host, _, port = address.rpartition(":")
        deadline = time.monotonic() + seconds
        while True:
            try:
                left = max(0.001, deadline - time.monotonic())
                line = socket.create_connection((host.strip("[]"), int(port)), timeout=left)
                break
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise PeerTimeoutError(
                        f"Expected the job's coordination service at {address} within {seconds:g} "
                        f"s (this is {task}). Got {type(error).__name__}: {error}. Look whether "
                        "the launcher, or the task that hosts it, runs and can be reached."
                    ) from None
                time.sleep(_CONNECT_RETRY_SECONDS)
        hello = {"task": task, "rank": rank, "terms": asdict(terms)}
        line.sendall(_message("hello", hello))  # before the watch sends its first beat
        member = cls(line, host, task, end)
        member.terms = terms
        return member

    def await_change(self, seconds: float) -> Generation:
        """Waits for a generation that this process has not joined yet.

        Raises:
            PeerTimeoutError: none was announced in time.
        """
        with self._news:
            if not self._news.wait_for(lambda: self.has_changed, seconds) or not self._latest:
                raise PeerTimeoutError(
                    f"Expected the tasks of the job to be there within {seconds:g} s (this is "
                    f"{self.task}). Not all have said hello to its coordination service. Look "
                    "which task has not started."
                )
            return self._latest

    @property
    def has_changed(self) -> bool:
        """Whether a generation was announced that this process has not joined."""
        return self._latest is not self._current

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
            job = self._wait(step, lambda: self.has_changed)
            self._set(Beat(self._beat.step, False, 0.0, doing))
            if not job.done:
                self.raise_if_changed()
            if _may_tell_of_a_loss(job.error):
                self._news.wait_for(lambda: self.has_changed, _NEWS_SECONDS)
                self.raise_if_changed()
            if job.error is not None:
                raise job.error
            self.finished += 1
            self._clean_up()
            return job.result

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

    def _wait(self, call: Callable[[], Any], enough: Callable[[], bool]) -> _Job:
        """Until a call in the thread is done, or leaves it behind once that is `enough`."""
        if self._thread is None:
            self._thread = _Runner(self._news)
        job = self._thread.submit(call)
        try:
            self._news.wait_for(lambda: job.done or enough())
        finally:  # Also when a signal's handler raises.
            if not job.done:
                self._thread.abandon()
                self._thread = None
        return job

    def close(self) -> None:
        """Says goodbye; ends the threads, except one that is stuck."""
        self._send("bye", None)
        with self._news:
            self._closed = True
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
                f"{', '.join(self._latest.members)} (this is {self.task})."
            )

    def _set(self, beat: Beat) -> None:
        self._beat, self._since = beat, time.monotonic()

    def _send(self, kind: str, said: Any) -> None:
        with contextlib.suppress(OSError):  # The watch sees the end of the connection.
            with self._sending:
                self._line.sendall(_message(kind, said))

    def _watch(self) -> None:
        """In a thread: beats, and hears what the service says."""
        self._line.settimeout(_BEAT_SECONDS)
        buffer = bytearray()
        while True:
            with self._news:
                beat = Beat(
                    self._beat.step, self._beat.busy, time.monotonic() - self._since,
                    self._beat.doing,
                )  # fmt: skip
            self._send("beat", asdict(beat))
            try:
                data = self._line.recv(1 << 16)
            except TimeoutError:
                continue
            except OSError:
                data = b""
            if self._closed:
                return
            if not data:
                self._end(f"{self.task}: the job's coordination service is gone.", False)
                return
            buffer += data
            while (at := buffer.find(b"\n")) >= 0:
                message, buffer[: at + 1] = json.loads(buffer[:at]), b""
                self._hear(message["kind"], message["said"])

    def _hear(self, kind: str, said: Any) -> None:
        if kind == "end":
            self._end(f"{said['why']} (this is {self.task}).", self.task in said.get("dump", ()))
            return
        members = tuple(said["members"])
        if self.task not in members:
            self._end(f"{self.task}: the others go on without it: {said['why']}.", True)
            return
        with self._news:
            # At the host at which it was found: what it listens at may be no address ("0.0.0.0").
            service = f"{self._host}:{said['port']}"
            self._latest = Generation(said["number"], members, service, said["why"])
            self._news.notify_all()


def _computed(result: T) -> T:
    """Waits for all arrays of a result.

    `jax.block_until_ready` takes Python's lock five times a second to look for signals. In a thread
    that is left behind, that ends a process at its exit with SIGABRT (before Python 3.14). Copying
    an array to the host waits without that; the smallest one comes last as well as any.
    """
    arrays = [
        leaf
        for leaf in jax.tree.leaves(result)
        if isinstance(leaf, jax.Array)
        and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)
    ]
    if arrays:
        np.asarray(min(arrays, key=lambda array: array.nbytes).addressable_data(0))
    return jax.block_until_ready(result)


def _may_tell_of_a_loss(error: BaseException | None) -> bool:
    """Whether it comes from XLA: small programs raise ValueError with the text of a status."""
    if isinstance(error, ValueError):
        return _STATUS.match(str(error)) is not None
    return isinstance(error, jax.errors.JaxRuntimeError)


def _message(kind: str, said: Any) -> bytes:
    return json.dumps({"kind": kind, "said": said}).encode() + b"\n"


class _Job:
    """A call in the thread of a `_Runner`."""

    def __init__(self, call: Callable[[], Any]):
        self.call: Callable[[], Any] | None = call
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None


class _Runner:
    """A thread that runs one call after the other, and can be left alone with one.

    Args:
        news: what to tell when a call is done; held by who calls the methods.
    """

    def __init__(self, news: threading.Condition):
        self._news = news
        self._job: _Job | None = None
        self._abandoned = False
        self._thread = threading.Thread(target=self._work, name="stratagem-step", daemon=True)
        self._thread.start()

    def is_this(self) -> bool:
        """Whether the caller is a call of this thread."""
        return threading.current_thread() is self._thread

    def submit(self, call: Callable[[], Any]) -> _Job:
        """Runs a call; its result is there once it is `done`."""
        self._job = job = _Job(call)
        self._news.notify_all()
        return job

    def abandon(self) -> None:
        """Ends the thread, once it is free."""
        self._abandoned = True
        self._news.notify_all()

    def _work(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._job is not None or self._abandoned)
                job, self._job = self._job, None
            if job is None or job.call is None:
                return
            try:
                job.result = _computed(job.call())
            except BaseException as error:
                job.error = error
            with self._news:
                # What the call holds has to go when the caller lets it go.
                job.call, job.done = None, True
                self._news.notify_all()
            del job


def _end_process(why: str, dump: bool) -> NoReturn:
    """Ends this process at once: its main thread may be anywhere, and never come back."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if dump:
            print("stratagem: this process is waited for. Its threads:", file=sys.stderr)
            sys.stderr.flush()
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
        print(f"stratagem: {why}", file=sys.stderr, flush=True)
    os._exit(PEER_LOST)
