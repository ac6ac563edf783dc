"""Getting over interruptions: backups, checkpoints, and leaving well when told to."""

from __future__ import annotations
