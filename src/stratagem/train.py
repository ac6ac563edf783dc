"""Saving and restoring training: backups, and the checkpoints that TensorFlow has in tf.train."""

from __future__ import annotations

from stratagem.recovery.backup import Backup as Backup
from stratagem.recovery.backup import Restored as Restored
from stratagem.recovery.checkpoint import Checkpoint as Checkpoint
from stratagem.recovery.checkpoint import CheckpointManager as CheckpointManager
from stratagem.recovery.checkpoint import latest_checkpoint as latest_checkpoint
