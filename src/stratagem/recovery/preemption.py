"""Leaving with a checkpoint when told to: all processes save the same step, then end."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from stratagem.recovery.agreement import Agreement, of_this_process
from stratagem.recovery.checkpoint import Checkpoint, CheckpointManager, counter
from stratagem.recovery.policy import PREEMPTED
from stratagem.recovery.termination import TerminationWatch

_RUNS = "checkpointed_runs"
_LEAVE, _FINAL = "leave", "final"
TOPICS = (_LEAVE, _FINAL)
# How many steps before the end of a grace period the last checkpoint is taken, as in TF.
_SPARE_STEPS = 6


class TerminationConfig:
    """How a job is told to end, and what happens then.

    Args:
        termination_watcher_fn: polled each second, instead of SIGTERM; True means to end.
        exit_fn: called after the last checkpoint; by default the process exits with 42.
        grace_period: seconds from the notice for which training may go on. 0: it ends after the
            next step. Otherwise it saves after the next step, goes on, and saves again at the end.
        save_fn: saves, instead of the checkpoint manager's `save`; gets the arguments of
            `save_checkpoint_if_preempted`.
    """

    def __init__(
        self,
        termination_watcher_fn: Callable[[], Any] | None = None,
        exit_fn: Callable[[], Any] | None = None,
        grace_period: float | None = None,
        save_fn: Callable[..., Any] | None = None,
    ):
        if grace_period is not None and grace_period < 0:
            raise ValueError(f"grace_period: expected seconds, at least 0. Got {grace_period}.")
        self.termination_watcher_fn = termination_watcher_fn
        self.exit_fn = leave if exit_fn is None else exit_fn
        self.grace_period = grace_period or 0.0
        self.save_fn = save_fn


class PreemptionCheckpointHandler:
    """Saves a checkpoint and ends the program, on all processes alike, when one is told to end.

    When it is created it restores the newest checkpoint, if there is one. From then on it watches
    for SIGTERM; a process that gets it, also while it waits for the others in a step, tells the
    others. All agree on one step, the next that none of them has begun, save after it and exit.

    Every process creates it, in its main thread, and calls `run` for each step. `close` (or a
    `with` block) puts the signal handler back; a program that just ends need not.

    Args:
        cluster_resolver: accepted for TF's sake: the job is known from the strategy.
        checkpoint_or_checkpoint_manager: what saves. A Checkpoint needs `checkpoint_dir`. The
            number of runs becomes part of it, as `checkpointed_runs`.
        checkpoint_dir: where a Checkpoint is saved.
        termination_config: how it is told to end, and what happens then.
        agreement: of the processes of the job; by default that of the job this one is in.

    Raises:
        ValueError: a Checkpoint without a directory.
        RuntimeError: not in the main thread.
    """

    def __init__(
        self,
        cluster_resolver: Any,
        checkpoint_or_checkpoint_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: str | Path | None = None,
        termination_config: TerminationConfig | None = None,
        *,
        agreement: Agreement | None = None,
    ):
        del cluster_resolver
        self._config = TerminationConfig() if termination_config is None else termination_config
        self._manager = _manager(checkpoint_or_checkpoint_manager, checkpoint_dir)
        self._runs = counter(_RUNS)
        self._manager.checkpoint.track(_RUNS, self._runs)
        self._manager.restore_or_initialize()
        self._count = int(np.asarray(self._runs.value))
        self._first = self._count
        self._began = time.monotonic()
        self._told_at: float | None = None
        self._leave_at: dict[str, int] = {}
        self._left = False
        self._agreement = of_this_process("preemption", TOPICS) if agreement is None else agreement
        for topic in TOPICS:
            self._agreement.announced(topic, self._count - 1)
        self._watch = TerminationWatch(
            lambda: self._agreement.announce(_LEAVE), self._config.termination_watcher_fn
        )
        self._watch.start()

    @property
    def total_run_calls(self) -> int:
        """Calls of `run`, those before the restored checkpoint included."""
        return self._count

    def run(self, distributed_train_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function that trains a step, unless it is time to save and exit."""
        self._boundary()
        result = distributed_train_function(*args, **kwargs)
        self._count += 1
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Counts a step that was made without `run`, and saves and exits when it is time.

        Args:
            args: of the checkpoint manager's `save`.
            kwargs: likewise.
        """
        self._boundary(*args, **kwargs)
        self._count += 1

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """A block in which a loop uses `save_checkpoint_if_preempted`; closes the handler."""
        with self:
            yield

    def close(self) -> None:
        """Ends watching, and puts the former signal handler back. In the main thread."""
        self._watch.stop()
        self._agreement.close()

    def __enter__(self) -> PreemptionCheckpointHandler:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _boundary(self, *args: Any, **kwargs: Any) -> None:
        """Between two steps."""
        if self._left:
            return
        if self._due(_LEAVE):
            self._save(*args, **kwargs)
            if not self._config.grace_period:
                self._leave()
                return
        if self._grace_is_over():
            self._agreement.announce(_FINAL)
        if self._config.grace_period and self._due(_FINAL):
            self._save(*args, **kwargs)
            self._leave()

    def _due(self, topic: str) -> bool:
        """True when the step that all agreed on has been made."""
        if not self._agreement.announced(topic, self._count):
            return False
        if topic not in self._leave_at:
            self._told_at = self._told_at or time.monotonic()
            latest = self._agreement.latest(topic, self._count)
            if latest is None:
                return False
            self._leave_at[topic] = latest + 1
        return self._count == self._leave_at[topic]

    def _grace_is_over(self) -> bool:
        if not self._config.grace_period or self._told_at is None:
            return False
        now = time.monotonic()
        step = (now - self._began) / max(1, self._count - self._first)
        return now >= self._told_at + self._config.grace_period - _SPARE_STEPS * step

    def _save(self, *args: Any, **kwargs: Any) -> None:
        self._runs.assign(self._count)
        (self._config.save_fn or self._manager.save)(*args, **kwargs)

    def _leave(self) -> None:
        self._left = True
        self.close()
        self._config.exit_fn()


class PreemptionWatcher:
    """TensorFlow's watcher, which does something only on a platform inside of Google.

    Use PreemptionCheckpointHandler, or callbacks.BackupAndRestore(save_before_preemption=True).
    """

    @property
    def preemption_message(self) -> None:
        """None: no message comes."""
        return None

    def block_until_worker_exit(self) -> None:
        """Returns at once, as TF's does on other platforms."""


def leave() -> None:
    """Ends the process with the exit code that says: told to end, and saved."""
    sys.exit(PREEMPTED)


def _manager(saver: Any, directory: str | Path | None) -> CheckpointManager:
    if isinstance(saver, CheckpointManager):
        return saver
    if not isinstance(saver, Checkpoint):
        raise TypeError(
            "Expected a stratagem.train.Checkpoint or CheckpointManager to save with. Got "
            f"{type(saver).__name__}."
        )
    if not directory:
        raise ValueError(
            "Expected checkpoint_dir with a Checkpoint, to know where to save. Got none. Pass "
            "checkpoint_dir, or a CheckpointManager."
        )
    return CheckpointManager(saver, directory, max_to_keep=1)
