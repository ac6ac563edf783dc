"""Runs a script up to its first step in a process of its own, for `stratagem plan`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stratagem import config


class PlanError(Exception):
    """Why nothing can be planned, for the user to read."""


def environment() -> dict[str, str]:
    """Variables of a process that is alone, whatever job this one is of."""
    return {k: v for k, v in config.environment().items() if k != "TF_CONFIG"}


def trace_process(
    module: str,
    wanted: Callable[[str], str],
    script: Sequence[str],
    variables: Mapping[str, str],
) -> str:
    """What the module writes of the script's first step.

    Args:
        module: to be run with what is wanted, and the script.
        wanted: what is wanted, given the file to write to; as JSON.
        script: and its arguments.
        variables: of the process.

    Raises:
        PlanError: the script failed, or ended without a step.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "program.json"
        command = [sys.executable, "-m", module, wanted(str(out)), *script]
        done = subprocess.run(command, env=dict(variables), stdout=2, check=False)
        counted = out.read_text() if out.is_file() else None
    if counted:
        return counted
    if counted is not None:
        raise PlanError(
            f"{script[0]}: expected a training step: fit, train_on_batch, strategy.run or a "
            "stratagem.function. Got the end of the script without one. Give it the arguments with "
            "which it trains."
        )
    raise PlanError(
        f"{script[0]}: expected it to run as far as its first training step. Got exit code "
        f"{done.returncode} before; its own message is above. Correct it, and try it alone."
    )
