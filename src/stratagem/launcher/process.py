"""A task as a process of this machine, with its guard; see `guard.py`."""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from stratagem.launcher import guard
from stratagem.launcher.supervisor import Exited, Name, Post, Running, Wrote

_CHUNK = 1 << 16
_LOOK_SECONDS = 0.5  # So often it is looked whether a guard was killed.
_MARK = "STRATAGEM_GUARDED_BY"  # In the environment of all that a task starts.


class Process(Running):
    """Starts a command, and a thread that posts what it writes and, at last, its end.

    Args:
        name: who it is in what is posted.
        command: what is run; `command[0]` is looked for on the PATH.
        environment: all its variables.
        post: is called from that thread.
        cwd: where it is run; None for the directory of this process.
    """

    def __init__(
        self,
        name: Name,
        command: Sequence[str],
        environment: Mapping[str, str],
        post: Post,
        cwd: str | None = None,
    ) -> None:
        mark = secrets.token_hex(8)
        self._mark = f"{_MARK}={mark}".encode()
        guarded, self._life = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-I", guard.__file__, str(guarded), *command],
                env={**environment, _MARK: mark},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(guarded,),
                start_new_session=True,  # Ctrl-C reaches the supervisor alone.
            )
        except BaseException:
            os.close(self._life)
            raise
        finally:
            os.close(guarded)
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._pump, args=(name, post), daemon=True)
        self._thread.start()

    def signal(self, signum: int) -> None:
        self._process.send_signal(signum)

    def kill(self) -> None:
        """Closes the pipe that keeps it alive."""
        with self._lock:
            if self._life >= 0:
                os.close(self._life)
                self._life = -1

    def _pump(self, name: Name, post: Post) -> None:
        with selectors.DefaultSelector() as pipes, self._process as process:
            for is_error, file in enumerate((process.stdout, process.stderr)):
                if file is not None:
                    pipes.register(file, selectors.EVENT_READ, bool(is_error))
            swept = False
            while pipes.get_map():
                ready = pipes.select(_LOOK_SECONDS)
                for pipe, _ in ready:
                    if data := os.read(pipe.fd, _CHUNK):
                        post(Wrote(name, pipe.data, data))
                    else:
                        pipes.unregister(pipe.fileobj)
                if process.poll() is not None:
                    # Either the pipes are at their end, or the guard was killed, and something
                    # that it would have killed holds them.
                    if swept and not ready:
                        break
                    swept = self._sweep(process.returncode)
            code = process.wait()
        self.kill()
        self._sweep(code)
        post(Exited(name, code))

    def _sweep(self, code: int) -> bool:
        """Does what the guard did not, where it may have been killed."""
        if code == -signal.SIGKILL:
            guard.kill_marked(self._mark)
        return True
