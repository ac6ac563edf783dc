"""Memory that two processes of a machine share, so that large arrays are not sent through TCP.

Each direction of a connection has an arena: a file in memory (memfd_create) that has no name in any
file system. Its sender writes an array there once; the message tells where; the receiver has mapped
the arena, read-only, and gets a view of it. The kernel frees an arena when no process maps it, so a
process that is killed leaves nothing behind. It is mapped through /proc/<pid>/fd, which the kernel
allows to the same user, where both see each other's processes.

An array lies in a block. Its slot, a byte at the beginning of the arena, says who may read it:
HANDED by the sender, OPENED by the receiver when it takes the message, FREE again when the last
view at the receiver dies. The sender keeps a block while its own array lives, which a request or
answer does until the other end cannot open it any more; then the slot alone decides.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
from collections import deque
from typing import Any

import numpy as np

from stratagem.errors import MalformedMessageError

FREE, HANDED, OPENED = range(3)

LEAST_BYTES = 1 << 15
"""Arrays below travel as frames. Measured between two processes: from there on memory is faster."""

_BYTES = 1 << 30  # of an arena; pages that were never written take no memory
_CONTROL = 1 << 16  # bytes of it before the blocks: a token, then the slots
_TOKEN = 64  # bytes that it may take
_ALIGNMENT = 64  # of blocks; what XLA wants of arrays that it uses in place
_NAME = "stratagem"
_IDLE_TICKS = 5


class _Memory:
    """Makes an array of some memory. `__del__` runs when no array has it any more, in any thread.

    NumPy asks for the attribute `__array_interface__`, and keeps the object that has it.
    """

    __slots__ = ("__array_interface__", "_gone", "_mapped", "_slot")

    def __init__(
        self, mapped: mmap.mmap, address: int, size: int, readonly: bool, gone: Any, slot: int
    ):
        self.__array_interface__ = {
            "version": 3, "shape": (size,), "typestr": "|u1", "data": (address, readonly),
        }  # fmt: skip
        self._mapped, self._gone, self._slot = mapped, gone, slot

    def __del__(self) -> None:
        self._gone(self._slot)


class Sender:
    """An arena that this end writes.

    Raises:
        OSError: the system has no such memory.
    """

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("the system has no memfd_create")
        self._file = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._file, _BYTES)
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _seals() | fcntl.F_SEAL_SEAL)
            self._mapped = mmap.mmap(self._file, _BYTES)
        except BaseException:
            os.close(self._file)
            raise
        self.token = secrets.token_bytes(16)
        self._mapped[: len(self.token)] = self.token
        self._base = np.frombuffer(self._mapped, np.uint8).__array_interface__["data"][0]
        self._blocks: list[tuple[int, int, int]] = []  # start, end, slot; by start
        self._slots = list(range(_CONTROL - 1, _TOKEN - 1, -1))  # free ones
        self._at: dict[int, int] = {}  # address -> slot, of blocks that are not handed yet
        self._gone: deque[int] = deque()  # slots whose array has died here
        self._lingering: set[int] = set()  # ... while the receiver has a view
        self._top = _CONTROL
        self._idle = 0

    @property
    def offer(self) -> list[Any]:
        """What the receiver needs to map it."""
        return [os.getpid(), self._file, self.token, _BYTES]

    @property
    def blocks(self) -> int:
        """Blocks in use."""
        self._reclaim()
        return len(self._blocks)

    def allocate(self, size: int) -> np.ndarray | None:
        """Memory for an array of so many bytes, as uint8; None where there is no room."""
        self._reclaim()
        if not self._slots:
            return None
        need = -(-size // _ALIGNMENT) * _ALIGNMENT
        start, index = _CONTROL, 0
        for other, end, _ in self._blocks:
            if other - start >= need:
                break
            start, index = end, index + 1
        if start + need > _BYTES:
            return None
        slot = self._slots.pop()
        self._blocks.insert(index, (start, start + need, slot))
        self._top, self._idle = max(self._top, start + need), 0
        self._mapped[slot] = FREE
        self._at[self._base + start] = slot
        memory = _Memory(self._mapped, self._base + start, size, False, self._gone.append, slot)
        return np.asarray(memory)

    def hand(self, array: np.ndarray) -> tuple[int, int] | None:
        """The place of an array of this arena, which is to be sent now; None for other arrays."""
        address = array.__array_interface__["data"][0]
        slot = self._at.pop(address, None)
        if slot is None:
            return None
        self._mapped[slot] = HANDED
        return slot, address - self._base

    def tick(self) -> None:
        """Gives pages back after a while without use."""
        self._idle += 1
        if self._idle >= _IDLE_TICKS and self._top > _CONTROL and not self.blocks:
            size = -(-self._top // mmap.PAGESIZE) * mmap.PAGESIZE - _CONTROL
            with contextlib.suppress(OSError):
                self._mapped.madvise(mmap.MADV_REMOVE, _CONTROL, size)
            self._top = _CONTROL

    def close(self) -> None:
        """Nobody can map it any more; arrays in it stay."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _reclaim(self) -> None:
        """Frees the blocks that nobody has any more."""
        while self._gone:
            self._lingering.add(self._gone.popleft())
        free = {slot for slot in self._lingering if self._mapped[slot] != OPENED}
        if not free:
            return
        self._lingering -= free
        for start, _, slot in self._blocks:
            if slot in free:
                self._at.pop(self._base + start, None)
        self._blocks = [block for block in self._blocks if block[2] not in free]
        self._slots.extend(free)


class Receiver:
    """An arena that the other end writes.

    Args:
        offer: what it says of it.

    Raises:
        OSError: it cannot be mapped here.
    """

    def __init__(self, offer: Any):
        pid, file, token, size = _checked(offer)
        path = f"/proc/{pid}/fd/{file}"
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            raise OSError("it is no memory of Stratagem")
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            sealed = fcntl.fcntl(opened, fcntl.F_GET_SEALS) & _seals() == _seals()
            if not sealed or os.fstat(opened).st_size != size:
                raise OSError("its size is another one, or can change")
            self._control = mmap.mmap(opened, _CONTROL)
            self._mapped = mmap.mmap(opened, size, prot=mmap.PROT_READ)
        finally:
            os.close(opened)
        if self._control[: len(token)] != token:
            raise OSError("it is another one")
        self.token, self._size = token, size
        self._base = np.frombuffer(self._mapped, np.uint8).__array_interface__["data"][0]

    def open(self, slot: int, start: int, size: int) -> np.ndarray:
        """A view of a block, as uint8; the block is freed when it, and all views of it, die."""
        if not (_TOKEN <= slot < _CONTROL and _CONTROL <= start and start + size <= self._size):
            raise MalformedMessageError(
                "Expected an array inside the shared memory in a message. Got one beyond it "
                f"(slot {slot}, bytes {start} to {start + size})."
            )
        if self._control[slot] != HANDED:
            raise MalformedMessageError(
                "Expected an array in shared memory that was handed over in a message. Got one "
                f"that was not, or was opened before (slot {slot})."
            )
        self._control[slot] = OPENED
        release = self._release
        return np.asarray(
            _Memory(self._mapped, self._base + start, size, True, release, slot)
        )  # fmt: skip

    def _release(self, slot: int) -> None:
        self._control[slot] = FREE


def _checked(offer: Any) -> tuple[int, int, bytes, int]:
    kinds = (int, int, bytes, int)
    if not isinstance(offer, list) or [type(part) for part in offer] != list(kinds):
        raise OSError("the offer is malformed")
    pid, file, token, size = offer
    if pid <= 0 or file < 0 or len(token) != 16 or not _CONTROL < size <= 1 << 40:
        raise OSError("the offer is malformed")
    return pid, file, token, size


def _seals() -> int:
    """So that the file cannot shrink under who reads it."""
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
