"""Jobs with parameter servers under `stratagem run`, whose tasks are killed, for tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

PROGRAMS = Path(__file__).parent / "programs"
RESULT = "RESULT "
SECONDS = 90.0


class PsJob:
    """`stratagem run` with a program; use it as a context manager.

    Args:
        directory: what the program writes to.
        program: name of a file in `programs`.
        told: its second argument.
        options: of `stratagem run`.
    """

    def __init__(
        self, directory: Path, program: str, told: Any, *options: str,
        workers: int = 2, servers: int = 2,
    ):  # fmt: skip
        self.directory = directory
        env = {k: v for k, v in os.environ.items() if not k.startswith("STRATAGEM_")}
        env |= {"KERAS_BACKEND": "jax", "JAX_COMPILATION_CACHE_DIR": "", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "stratagem.cli", "run",
                "--workers", str(workers), "--ps", str(servers), *options,
                str(PROGRAMS / f"{program}.py"), str(directory), json.dumps(told),
            ],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.output = ""

    def __enter__(self) -> PsJob:
        return self

    def __exit__(self, *_: object) -> None:
        for task in psutil.Process(self.process.pid).children(recursive=True) if (
            self.process.poll() is None
        ) else ():
            task.kill()
        self.process.kill()
        self.process.communicate()

    def task(self, job: str, index: int) -> psutil.Process:
        """The process of a task that runs now."""

        def found() -> psutil.Process | None:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                try:
                    told = json.loads(child.environ().get("TF_CONFIG", "{}")).get("task")
                except (psutil.Error, OSError):
                    continue
                if told == {"type": job, "index": index}:
                    return child
            return None

        return self.until(found, f"{job} {index}")

    def until(self, look: Callable[[], Any], what: str) -> Any:
        """Waits for something to be so."""
        end = time.monotonic() + SECONDS
        while not (found := look()):
            if self.process.poll() is not None or time.monotonic() > end:
                self.process.kill()
                output, _ = self.process.communicate()
                raise AssertionError(f"waited in vain for {what}:\n{output[-6000:]}")
            time.sleep(0.02)
        return found

    def reaches(self, epoch: int, batch: int) -> None:
        """Waits until the program has scheduled a batch of an epoch."""

        def there() -> bool:
            try:
                at = (self.directory / "progress").read_text().split()
            except FileNotFoundError:
                return False
            return len(at) == 2 and (int(at[0]), int(at[1])) >= (epoch, batch)

        self.until(there, f"batch {batch} of epoch {epoch}")

    def kill(self, job: str, index: int, number: int = signal.SIGKILL) -> psutil.Process:
        """Sends a signal to a task."""
        process = self.task(job, index)
        process.send_signal(number)
        return process

    def result(self, code: int = 0) -> Any:
        """Waits for the end; what the program has handed back."""
        try:
            self.output, _ = self.process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            for task in psutil.Process(self.process.pid).children(recursive=True):
                task.kill()
            self.output, _ = self.process.communicate(timeout=10)
            raise AssertionError(f"it does not end:\n{self.output[-8000:]}") from None
        assert self.process.returncode == code, self.output[-8000:]
        lines = [line for line in self.output.splitlines() if RESULT in line]
        return json.loads(lines[-1].partition(RESULT)[2]) if lines else None
