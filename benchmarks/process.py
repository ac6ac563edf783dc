"""A contender's process: starts it, gives it its turns, reads what it measured."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from contenders import OURS, PEER, Contender

CASES = Path(__file__).resolve().parent / "cases"
# Keras chooses its backend by a variable. NPROC is the size of XLA's thread pool, which must be
# larger than the devices are many. TensorFlow says on each start that it found no GPU.
ENVIRONMENT = {
    OURS: {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "NPROC": "8"},
    PEER: {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""},
}
TIMEOUT = 300  # seconds for the whole life of a process


class ContenderProcess:
    """Use in a `with`: the process ends with it.

    Args:
        contender: what runs.
        python: with which interpreter.
        steps: steps in one sample.
        samples: samples that will be asked for.
    """

    def __init__(self, contender: Contender, python: Path, steps: int, samples: int):
        script, *arguments = contender.command
        self._name = contender.name
        self._command = [str(python), str(CASES / script), *arguments]
        self._command += ["--steps", str(steps), "--samples", str(samples)]
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            self._command,
            env={**os.environ, **ENVIRONMENT[contender.python]},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._timer = threading.Timer(TIMEOUT, self._process.kill)
        self._timer.start()

    def read(self, *names: str) -> tuple[Any, ...]:
        """The named facts of the next line that holds them.

        Raises:
            RuntimeError: the process ended before; with the end of what it said.
        """
        for line in self._process.stdout or ():
            if line.startswith("{"):
                facts = json.loads(line)
                return tuple(facts[name] for name in names)
        status = self._process.wait()
        self._errors.seek(0)
        raise RuntimeError(
            f"Expected {self._name!r} to print {', '.join(names)} within {TIMEOUT} s. Got exit "
            f"status {status} from {' '.join(self._command)}:\n{self._errors.read()[-3000:]}"
        )

    def sample(self) -> float:
        """Lets the contender take a sample."""
        if self._process.poll() is None and self._process.stdin is not None:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        (value,) = self.read("sample")
        return value

    def __enter__(self) -> ContenderProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        self._timer.cancel()
        if kind is not None:
            self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._errors):
            if file is not None:
                file.close()
