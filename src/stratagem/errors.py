"""What callers may want to catch; misuse raises TypeError, ValueError or RuntimeError."""

from __future__ import annotations


class StratagemError(Exception):
    """Base of every error that a caller may sensibly handle."""


class ReplicaDependentWriteError(StratagemError, RuntimeError):
    """A step writes a value that differs between replicas to a variable that must stay equal."""


class ReplicaBranchError(StratagemError, RuntimeError):
    """Python code in a replica function branched on a value that is only known per replica."""


class StrategyMismatchError(StratagemError, RuntimeError):
    """Objects that belong to different strategies met in one program."""


class UnevenShapesError(StratagemError, ValueError):
    """Replicas hold shapes that the requested operation cannot combine."""


class OutOfRangeError(StratagemError, IndexError):
    """`get_next` was called past the end of a distributed dataset."""


class DivergedError(StratagemError, FloatingPointError):
    """The debug mode found a replica that differs from the others or holds NaN or infinity."""
