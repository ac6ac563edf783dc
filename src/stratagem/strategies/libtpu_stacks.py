"""How large the stacks of libtpu's threads are: some programs it compiles with one size only."""

from __future__ import annotations

import ctypes

_BYTES = 2 << 20
_ATTRIBUTES = 128  # bytes, at least those of glibc's pthread_attr_t


def fit() -> None:
    """Gives threads that are started from now on stacks of 2 MiB, but those that ask for others.

    Call it before libtpu starts its own. Its compiler goes down some programs by recursion. With
    stacks of 2 MiB it comes up again; with 8 MiB, as `ulimit -s` mostly says, and with 64 and 512,
    it ends the process: "SIGSEGV STACK OVERFLOW ... MigrateInstructionUsers" (tried with libtpu
    0.0.42.1 and the step of a small CNN for v6e:2x2 and 2x4; why smaller ones do is not known).
    It also does so where JAX has looked for a TPU before: start with JAX_PLATFORMS=cpu.

    Raises:
        OSError: the C library refuses.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "pthread_setattr_default_np"):
        return  # no GNU system: there is no libtpu for it
    attributes = ctypes.create_string_buffer(_ATTRIBUTES)
    for failed in (
        libc.pthread_getattr_default_np(attributes),
        libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(_BYTES)),
        libc.pthread_setattr_default_np(attributes),
    ):
        if failed:
            raise OSError(
                failed,
                f"Expected stacks of {_BYTES} bytes for libtpu's threads. Got error {failed} of "
                "the C library. Run `ulimit -s unlimited` before this program",
            )
