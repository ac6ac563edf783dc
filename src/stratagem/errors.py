"""What callers may want to catch; misuse raises TypeError, ValueError or RuntimeError."""

from __future__ import annotations


class StratagemError(Exception):
    """Base of every error that a caller may sensibly handle."""


class ReplicaDependentWriteError(StratagemError, RuntimeError, ValueError):
    """A step writes a value that differs between replicas to a variable that must stay equal.

    TensorFlow, where it notices, raises ValueError.
    """


class ReplicaBranchError(StratagemError, RuntimeError):
    """Python code in a replica function branched on a value that is only known per replica."""


class StrategyMismatchError(StratagemError, RuntimeError):
    """Objects that belong to different strategies met in one program."""


class UnevenShapesError(StratagemError, ValueError):
    """Replicas hold shapes that the requested operation cannot combine."""


class OutOfRangeError(StratagemError, IndexError):
    """`get_next` was called past the end of a distributed dataset."""


class ReadInsideProgramError(StratagemError, ValueError):
    """A dataset was read inside a compiled function, which would see one batch for ever."""


class DivergedError(StratagemError, FloatingPointError):
    """The debug mode found a replica that differs from the others or holds NaN or infinity."""


class PeerTimeoutError(StratagemError, TimeoutError):
    """Other processes of the job did not come in time; the text names them."""


class GroupChangedError(StratagemError, RuntimeError):
    """Processes of the job were lost, or join: a step has no result in this process."""


class JobMismatchError(StratagemError, RuntimeError):
    """The processes of a job do not agree on the cluster, the program or the data."""


class BackupError(StratagemError, RuntimeError):
    """A backup or checkpoint could not be written, or none could be restored."""


class CorruptBackupError(BackupError):
    """A backup or checkpoint cannot be read back as it was written."""


class BackupMismatchError(BackupError, ValueError):
    """A backup or checkpoint is one of other variables, or of other data."""
