"""Saving and restoring with Orbax in this process alone; the other ones do not take part."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from stratagem import _orbax

_ARRAYS, _FACTS = "arrays", "facts"
# Two saves at once in one process mix up whose directories are made (Orbax 0.12).
_one_at_a_time = threading.Lock()


def save(path: Path, arrays: dict[str, np.ndarray], facts: dict[str, Any]) -> None:
    """Writes both under a temporary name, and renames it when all is there.

    Once more where the processes of the job change meanwhile, whose service Orbax uses.
    """
    items = {_ARRAYS: ocp.args.StandardSave(arrays), _FACTS: ocp.args.JsonSave(facts)}
    with _one_at_a_time:
        for last in (False, True):
            _orbax.forget_coordination_service()
            try:
                with _checkpointer() as writer:
                    writer.save(path, args=ocp.args.Composite(**items), force=True)
                return
            except jax.errors.JaxRuntimeError:
                if last:
                    raise


def restore(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays and the facts that were saved."""
    items = {_ARRAYS: ocp.args.StandardRestore(), _FACTS: ocp.args.JsonRestore()}
    with _one_at_a_time, _checkpointer() as reader:
        found = reader.restore(path, args=ocp.args.Composite(**items))
    return found[_ARRAYS], found[_FACTS]


def _checkpointer() -> ocp.Checkpointer:
    this = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=this, active_processes={this}, barrier_sync_key_prefix=f"stratagem{this}"
    )
    # Both take the options; without them each waits for all processes.
    items = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=alone)
    )
    return ocp.Checkpointer(items, multiprocessing_options=alone)
