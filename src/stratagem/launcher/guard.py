"""Runs one command, and leaves nothing of it behind, whatever happens to whom.

    python guard.py FD COMMAND ARGUMENT ...

It stands between the supervisor and a task, and is run as a file, without importing the package:
it has to start in milliseconds and stay small. FD is the read end of a pipe whose other end only
the supervisor holds.

- The supervisor ends, also by kill -9: the pipe closes, and the task and all its descendants are
  killed.
- The guard ends, also by kill -9: the kernel kills the task (Linux).
- The task ends: what it has started is killed, also what has moved to a session of its own, and
  the guard ends as the task did, with its exit code or by its signal.
- SIGTERM, SIGINT and SIGHUP go on to the task's own process. Its children are its own affair
  while it leaves: it may need them to save.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_NOT_FOUND = 127  # As in shells.
_HAS_PROC = os.path.isdir("/proc/self")


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code, or does not return where a signal ended it."""
    pipe, command = int(arguments[0]), arguments[1:]
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # Orphans of the task become children of this process.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    guard, task = os.getpid(), os.fork()
    if task == 0:
        os.close(pipe)
        _become(command, guard)
    for signum in _FORWARDED:
        signal.signal(signum, _forward_to(task))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    threading.Thread(target=_watch, args=(pipe, task), daemon=True).start()
    status = _wait(task)
    kill_rest(task)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        _die_of(-code)
    return code


def children_of(pid: int) -> list[int]:
    """The processes whose parent is `pid`; none where there is no /proc."""
    found = []
    for name in _processes():
        fields = _read(name, "stat").rpartition(b")")[2].split()
        # After the name: state, parent, group, session.
        if fields and int(fields[1]) == pid and fields[0] != b"Z":
            found.append(int(name))
    return found


def kill_marked(variable: bytes) -> None:
    """Kills all processes that were started with `NAME=value` in their environment.

    For what is left when a guard was killed: nobody knows it as a child any more.
    """
    while True:
        marked = [name for name in _processes() if variable in _read(name, "environ").split(b"\0")]
        if not marked:
            return
        for name in marked:
            _kill(os.kill, int(name))


def kill_rest(task: int) -> None:
    """Kills the process group that `task` led, and every process that became ours."""
    _kill(os.killpg, task)
    while True:
        for pid in children_of(os.getpid()):
            _kill(os.kill, pid)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _become(command: list[str], guard: int) -> None:
    """In the child: turns into the command."""
    try:
        os.setpgid(0, 0)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:  # It was killed before the line above.
            os._exit(1)
        for signum in _FORWARDED:  # A shell's `&` has them ignored, which tasks would inherit.
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"stratagem: cannot run {command[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(_NOT_FOUND)


def _watch(pipe: int, task: int) -> None:
    """Kills all once the supervisor is gone: then nobody is left who could wait for a grace."""
    while os.read(pipe, 1):
        pass
    _kill(os.kill, task)  # The main thread waits for it, and does the rest.


def _wait(task: int) -> int:
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == task:
            return status


def _forward_to(task: int) -> Callable[[int, object], None]:
    def forward(signum: int, _frame: object) -> None:
        try:
            os.kill(task, signum)
        except ProcessLookupError:  # It has ended.
            pass

    return forward


def _die_of(signum: int) -> None:
    """Ends this process by a signal, without a second core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if signum not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
    signal.pause()


def _processes() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdecimal()] if _HAS_PROC else []


def _read(process: str, file: str) -> bytes:
    try:
        with open(f"/proc/{process}/{file}", "rb") as opened:
            return opened.read()
    except OSError:  # It has just ended, or is another user's.
        return b""


def _kill(kill: Callable[[int, int], None], pid: int) -> None:
    try:
        kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # Ended, or turned into another user's.
        pass


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
