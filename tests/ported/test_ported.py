"""The programs of TensorFlow's distribution guides run after one import was changed, and agree.

Each program in `programs` is a user's program for TensorFlow. It runs here with
`import tensorflow as tf` replaced, and must print the numbers that TensorFlow 2.21 printed, which
`recorded.json` keeps. Where a TensorFlow is installed it runs there too, in the same test: name its
Python in STRATAGEM_PEER, or run `make bench` once.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
IMPORT = "import tensorflow as tf\n"
OURS = "from stratagem.compat import tensorflow as tf\n"
RECORDED: dict[str, Any] = json.loads((HERE / "recorded.json").read_text())
TOLERANCE = 2e-5  # relative, of float32 sums in other orders over some tens of steps
DEADLINE_SECONDS = 140
# Chosen by the test session for its own process.
OWN = {
    "NPROC",
    "XLA_FLAGS",
    "JAX_NUM_CPU_DEVICES",
    "STRATAGEM_REHEARSE",
    "TF_CONFIG",
    "KERAS_BACKEND",
}

# A program of two workers, under both libraries, on a busy machine.
pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@dataclasses.dataclass(frozen=True)
class Ported:
    """A program.

    Args:
        workers: processes that run it, each with its TF_CONFIG; 0 for one without.
        legacy: whether TensorFlow needs tf_keras for it, since Keras 3 fails there.
    """

    workers: int = 0
    legacy: bool = False


PROGRAMS = {
    "distributed_training_guide": Ported(),
    "keras_tutorial": Ported(),
    "custom_training": Ported(legacy=True),
    "save_and_load": Ported(),
    "distributed_input": Ported(),
    "multi_worker_with_keras": Ported(workers=2, legacy=True),
    "multi_worker_ctl": Ported(workers=2, legacy=True),
    "parameter_server": Ported(legacy=True),
}


def peer() -> str | None:
    """The Python that has TensorFlow, if there is one."""
    beside = ROOT / ".venv-peer" / "bin" / "python"
    return os.environ.get("STRATAGEM_PEER") or (str(beside) if beside.exists() else None)


def clusters(workers: int) -> list[dict[str, str]]:
    """The TF_CONFIG of each process, on free ports of loopback."""
    if not workers:
        return [{}]
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(workers)]
    addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    for s in sockets:
        s.close()
    return [
        {
            "TF_CONFIG": json.dumps(
                {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": i}}
            )
        }
        for i in range(workers)
    ]


def run(python: str, source: str, directory: Path, ported: Ported, **environment: str) -> Any:
    """Runs a program as a job; returns what each process printed behind RESULT."""
    script = directory / "program.py"
    script.write_text(source)
    inherited = {name: text for name, text in os.environ.items() if name not in OWN}
    inherited |= {"CHECKPOINTS": str(directory / "checkpoints"), "TMPDIR": str(directory)}
    processes = [
        subprocess.Popen(
            [python, str(script)],
            env=inherited | environment | config,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for config in clusters(ported.workers)
    ]
    try:
        ended = [process.communicate(timeout=DEADLINE_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    results = []
    for process, (out, err) in zip(processes, ended, strict=True):
        assert process.returncode == 0, err[-3000:]
        (line,) = [text for text in out.splitlines() if text.startswith("RESULT ")]
        results.append(json.loads(line.removeprefix("RESULT ")))
    return results


@functools.cache
def ours(name: str, directory: Path) -> Any:
    """What a program prints under Stratagem."""
    source = (HERE / "programs" / f"{name}.py").read_text()
    assert source.count(IMPORT) == 1
    source = source.replace(IMPORT, OURS)
    return run(sys.executable, source, directory, PROGRAMS[name], JAX_PLATFORMS="cpu")


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> dict[str, Path]:
    return {name: tmp_path_factory.mktemp(name) for name in PROGRAMS}


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a result, each with where it is."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from numbers(item, f"{path}/{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from numbers(item, f"{path}[{index}]")
    else:
        yield path, value


def assert_same(found: Any, expected: Any) -> None:
    left, right = dict(numbers(found)), dict(numbers(expected))
    assert left.keys() == right.keys()
    differ = {
        path: (left[path], right[path]) for path in left if not _close(left[path], right[path])
    }
    assert not differ


def as_row(name: str, found: Any, expected: Any) -> str:
    """A line of the table in the porting guide: the last number of both, and how they differ."""
    left, right = dict(numbers(found)), dict(numbers(expected))
    floats = [path for path, value in right.items() if isinstance(value, float)]
    most = max(abs(left[path] - right[path]) for path in floats)
    last = floats[-1]
    values = f"`{last.lstrip('/')}` | {left[last]:.7g} | {right[last]:.7g}"
    return f"| `{name}.py` | {len(right)} | {values} | {most:.1e} |"


def _close(found: Any, expected: Any) -> bool:
    if isinstance(expected, str):
        return found == expected
    return found == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)


def test_every_program_is_in_the_table():
    files = {path.stem for path in (HERE / "programs").glob("*.py")}
    assert files == PROGRAMS.keys() == RECORDED.keys()


@pytest.mark.parametrize("name", PROGRAMS)
def test_recorded_numbers(name, directories):
    assert_same(ours(name, directories[name]), RECORDED[name])


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_as_tensorflow(name, directories, tmp_path, record_property, capsys):
    python = peer()
    if python is None:
        pytest.skip("no TensorFlow: name its Python in STRATAGEM_PEER, or run `make bench`")
    source = (HERE / "programs" / f"{name}.py").read_text()
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    legacy = {"TF_USE_LEGACY_KERAS": "1"} if PROGRAMS[name].legacy else {}
    theirs = run(python, source, tmp_path, PROGRAMS[name], **quiet, **legacy)
    mine = ours(name, directories[name])
    assert_same(mine, theirs)
    assert_same(theirs, RECORDED[name])
    row = as_row(name, mine, theirs)
    record_property("both", row)
    with capsys.disabled():
        print(f"\n{row}", end="")
