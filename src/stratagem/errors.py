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


class PeerLostError(StratagemError, ConnectionError):
    """Another process was restarted, or has ended, while it was asked for something."""


class MalformedMessageError(StratagemError, ValueError):
    """What came from another process, or should go to one, is no message that tasks exchange."""


class RemoteError(StratagemError, RuntimeError):
    """A task could not do what it was asked for.

    Args:
        who: the task, as errors name it.
        method: what it was asked for.
        type_name: the class of the error there.
        text: what that error says.
        traceback: where it was raised there.
    """

    def __init__(self, who: str, method: str, type_name: str, text: str, traceback: str = ""):
        where = f"\n\nThere:\n{traceback.rstrip()}" if traceback else ""
        super().__init__(f"{who} could not do {method!r}: {type_name}: {text}{where}")
        self.who, self.method, self.type_name = who, method, type_name
        self.text, self.traceback = text, traceback

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.who, self.method, self.type_name, self.text, self.traceback)


class NotReadyError(StratagemError, RuntimeError):
    """A parameter server has no state of this job: it was restarted, or serves another job."""


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


class TableFullError(StratagemError, RuntimeError):
    """A dynamic table has no room for the rows of new ids."""
