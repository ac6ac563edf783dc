"""What the documents say about the code is true of the code."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import stratagem

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "stratagem"
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
DOCUMENTS = sorted(ROOT.glob("*.md"))
MAX_FIRST_PROGRAM_LINES = 10
# What ARCHITECTURE.md names, and is no word of the source.
NAMES_FROM_ELSEWHERE = {"Optimizer", "get_weights", "ROOMS"}


def _section(text: str, heading: str) -> str:
    """The text under a heading, up to the next one of its level."""
    _, _, rest = text.partition(f"\n## {heading}\n")
    assert rest, f"no section {heading!r}"
    return rest.partition("\n## ")[0]


def _blocks(text: str, language: str = "") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def _rows(text: str) -> list[list[str]]:
    """The body of the tables in a text."""
    lines = [line.strip("| ") for line in text.splitlines() if line.startswith("|")]
    rows = [re.split(r"\s*\|\s*", line) for line in lines]
    return [row for i, row in enumerate(rows[2:], 2) if not set(rows[i][0]) <= set("- ")]


@pytest.mark.processes
def test_the_first_program_runs():
    (program,) = _blocks(README, "python")
    assert len([line for line in program.splitlines() if line.strip()]) <= MAX_FIRST_PROGRAM_LINES
    environment = {name: v for name, v in os.environ.items() if name not in {"NPROC", "XLA_FLAGS"}}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "Epoch 3/3" in done.stdout


def test_the_table_of_strategies():
    """It has all that can be imported, and nothing else."""
    rows = _rows(_section(README, "Strategies"))
    listed = {re.findall(r"`(?:experimental\.)?(\w+)", name)[0] for name, _ in rows}
    here = {name for name in vars(stratagem) if name.endswith("Strategy") and name[0] != "_"}
    assert here - {"Strategy"} | {"get_strategy", "CentralStorageStrategy"} == listed


def test_names_exist():
    """Every `stratagem.a.b` of the README exists, wherever it is written."""
    found = re.findall(r"`(?:@)?(stratagem(?:\.\w+)+)", README)
    assert found
    for name in set(found):
        value: object = stratagem
        for part in name.split(".")[1:]:
            assert hasattr(value, part), name
            value = getattr(value, part)


def test_names_of_the_code_exist():
    """Every name in ARCHITECTURE.md is a word of the source: a renamed function must not stay."""
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    words = set(re.findall(r"\w+", source)) | NAMES_FROM_ELSEWHERE
    named = re.findall(r"`([A-Za-z_][\w.]*)`", ARCHITECTURE)
    parts = {part for name in named if not name.endswith(".py") for part in name.split(".")}
    assert sorted(parts - words) == []


def test_names_of_the_public_api_exist():
    names = set(re.findall(r"`(\w+(?:AllReduce|ToOneDevice))", README))
    assert len(names) == 6
    for name in names:
        assert issubclass(getattr(stratagem, name), stratagem.CrossDeviceOps)


def test_the_table_of_examples():
    listed = {re.findall(r"`(.*?)`", row[0])[0] for row in _rows(_section(README, "Examples"))}
    assert listed == {path.name for path in (ROOT / "examples").glob("*.py")}


def test_the_rooms():
    rooms = runpy.run_path(str(Path(__file__).parent / "test_imports.py"))["ROOMS"]
    (block,) = _blocks(_section(ARCHITECTURE, "Rooms"))
    listed = tuple(
        tuple(name.strip() for name in line.partition("|")[0].split(","))
        for line in block.splitlines()
    )
    assert listed == rooms


def test_the_promised_path(monkeypatch):
    """The stack at a patched `psum` is the path that ARCHITECTURE.md promises."""
    stacks = []
    psum = jax.lax.psum

    def recording(*args, **kwargs):
        frame, stack = sys._getframe(1), []
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(PACKAGE):
                stack.append((path.relative_to(PACKAGE).as_posix(), frame.f_code.co_qualname))
            frame = frame.f_back
        stacks.append(stack[::-1])
        return psum(*args, **kwargs)

    monkeypatch.setattr(jax.lax, "psum", recording)
    strategy = stratagem.MirroredStrategy(["CPU:0", "CPU:1"])
    rows = stratagem.PerReplica([np.float32(1), np.float32(2)])
    strategy.run(lambda x: stratagem.get_replica_context().all_reduce("SUM", x), (rows,))
    (block,) = _blocks(_section(ARCHITECTURE, "The promised path"))
    promised = [tuple(line.split()[:2]) for line in block.splitlines() if line[0] != " "]
    assert stacks == [promised]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(path):
    places = (ROOT, PACKAGE, PACKAGE / "step", ROOT / "examples", ROOT / "tests")
    named = re.findall(r"[`(]([\w./-]+\.(?:py|md))\b", path.read_text())
    made_up = {"train.py"}
    missing = {n for n in named if not any((p / n).exists() for p in places)} - made_up
    assert not missing


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_lines_are_short(path):
    allowed = 120  # a table's row and a program's line may not be broken
    assert [line for line in path.read_text().splitlines() if len(line) > allowed] == []
