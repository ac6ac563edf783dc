"""Backups of a training loop of one's own. In `fit`, use callbacks.BackupAndRestore."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stratagem.recovery import randomness, state
from stratagem.recovery.archive import Archive, Cut
from stratagem.recovery.peers import Peers
from stratagem.recovery.position import Pass
from stratagem.recovery.state import mine


@dataclasses.dataclass(frozen=True)
class Restored:
    """Where training goes on.

    Attributes:
        step: as it was given to `save`; 0 when there was no backup.
        epoch: likewise.
        state: likewise; {} when there was no backup.
        path: of the backup, on the chief; None when there was none.
    """

    step: int = 0
    epoch: int = 0
    state: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    path: Path | None = None


class Backup:
    """Saves a training loop as a whole, and goes on where it was, bit for bit.

    A backup is one consistent cut: the objects' variables, the random state (of Keras' seed
    generators among the variables, of Python, NumPy and Keras' unseeded calls), the position in
    the data, the step, the epoch and a dict of one's own. It is written while training goes on,
    and complete or not there at all. It does not depend on the strategy: it may be restored on
    another number of replicas or processes.

    Every process of a job makes the same calls; the chief writes.

        with stratagem.train.Backup("backups", model=model, optimizer=optimizer) as backup:
            start = backup.restore()
            step = start.step
            for epoch in range(start.epoch, 10):
                for batch in backup.batches(dataset):
                    strategy.run(train_step, args=(batch,))
                    step += 1
                    if step % 100 == 0:
                        backup.save(step, epoch)
            backup.remove()

    Args:
        directory: where the chief keeps them, and nothing else.
        keep: how many, at least 1.
        objects: models, optimizers, metrics, variables, and lists and dicts of them, by name.

    Raises:
        ValueError: `keep` is below 1, or there are no objects.
        BackupError: the directory cannot be written.
    """

    def __init__(self, directory: str | Path, keep: int = 2, **objects: Any):
        check_keep(keep)
        if not objects:
            raise ValueError(
                "Expected what to back up. Got nothing. Pass it by name: Backup(directory, "
                "model=model, optimizer=optimizer)."
            )
        state.collect(**objects)  # refuses what it cannot save now, not after an hour
        self._objects = objects
        self._archive = Archive(directory, keep, Peers.of_this_process("backup"))
        self._archive.prepare()
        self._pass: Pass | None = None
        self._resumed: Any = None

    def batches(self, dataset: Iterable[Any]) -> Pass:
        """One pass through a dataset, whose position is part of the backups.

        The first one after `restore` goes on with the pass that was interrupted: by the state of
        the dataset's iterator where it has `get_state` and `set_state`; else the pass is begun
        again with the random state that it began with, and what was drawn is dropped.
        """
        self._pass = Pass(dataset, *(self._resumed or ()))
        self._resumed = None
        return self._pass

    def save(self, step: int, epoch: int = 0, state: Mapping[str, Any] | None = None) -> None:
        """Takes a backup of now, and begins to write it; waits for the one before it.

        Args:
            step: steps done.
            epoch: epochs done.
            state: what JSON can hold.

        Raises:
            TypeError: JSON cannot hold the state.
        """
        facts = {"step": int(step), "epoch": int(epoch), "state": checked_json(state or {})}
        run = None if self._pass is None or self._pass.ended else self._pass
        random = randomness.get_state() if run is None else run.random_state()
        process = {"random": random, "pass": None if run is None else run.position()}
        self._save(facts, process)

    def _save(self, facts: dict[str, Any], process: Any) -> None:
        groups = self._groups()

        def give() -> bytes:
            return Cut.of_this_process(groups, facts, process, {}, mine).packed()

        self._archive.save(groups, facts, process, give=give)

    def restore(self) -> Restored:
        """Gives everything the values of the newest backup that is sound; none: changes nothing.

        A damaged one is passed over with a RuntimeWarning. A process that replaces a lost one
        waits for the next `save` of the others, and gets what they hold then, from memory.

        Raises:
            BackupError: all are damaged.
            BackupMismatchError: it is of other variables; lists every difference.
        """
        joins = self._archive.peers.is_waiting
        cut = self._joined() if joins else self._archive.load()
        if cut is None:
            return Restored()
        groups = self._groups()
        cut.check(groups)
        cut.apply(groups)
        process = cut.processes[min(self._archive.peers.rank, len(cut.processes) - 1)]
        randomness.set_state(process["random"])
        if process["pass"] is not None:
            self._resumed = process["pass"], process["random"]
        facts = cut.facts
        if joins:  # the others are in their `save`
            self._save(facts, process)
            return Restored(facts["step"], facts["epoch"], facts["state"])
        return Restored(facts["step"], facts["epoch"], facts["state"], cut.path)

    def _joined(self) -> Cut:
        """What the others hold at their next `save`, in which this process joins them."""
        cut = Cut.unpacked(self._archive.peers.enter())
        if "step" not in cut.facts:
            raise RuntimeError(
                "Expected the other processes in stratagem.train.Backup.save, where this one can "
                "join, in the place of a lost one. Got them in a step of fit. Run the same program "
                "on every process of the job."
            )
        return cut

    def wait(self) -> None:
        """Returns when the last backup is written.

        Raises:
            BackupError: it could not be; those before it are unharmed.
        """
        self._archive.wait()

    def remove(self) -> None:
        """Deletes all backups: training is finished."""
        self._archive.remove_all()

    def _groups(self) -> dict[str, list[Any]]:
        state.build_optimizers(**self._objects)
        return state.collect(**self._objects)

    def __enter__(self) -> Backup:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self.wait()
        else:  # without the others, who may not come here
            self._archive.storage.wait()


def check_keep(keep: int) -> None:
    """Refuses a number of backups to keep that is below 1."""
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ValueError(f"keep: expected how many backups stay, at least 1. Got {keep!r}.")


def checked_json(value: Any) -> Any:
    """A value that is the same after JSON.

    Raises:
        TypeError: it is not.
    """
    try:
        same = json.loads(json.dumps(value)) == value
    except (TypeError, ValueError):
        same = False
    if not same:
        raise TypeError(
            f"state: expected what JSON can hold (str, int, float, bool, None, and lists and dicts "
            f"with str keys of them). Got {value!r}. Keep arrays in a keras.Variable among the "
            "objects."
        )
    return value
