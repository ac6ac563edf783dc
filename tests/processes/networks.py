"""Two machines on one: network namespaces with a cable between them, for tests."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Sequence

_COUNT = itertools.count()


def missing() -> str:
    """Why there can be none here; empty if they can."""
    if shutil.which("ip") is None:
        return "needs the command `ip` (Debian: iproute2)"
    probe = f"st{os.getpid()}probe"
    made = _ip(["netns", "add", probe])
    if made.returncode:
        return f"needs the right to make network namespaces: {made.stderr.strip()}"
    cable = [f"st{os.getpid()}x", f"st{os.getpid()}y"]
    made = _ip(["link", "add", cable[0], "type", "veth", "peer", "name", cable[1]])
    _ip(["link", "del", cable[0]])
    _ip(["netns", "del", probe])
    return f"needs pairs of virtual cards: {made.stderr.strip()}" if made.returncode else ""


class Cable:
    """Two namespaces, each with one end of a cable; use it as a context manager.

    Attributes:
        hosts: the address of each end.
    """

    hosts = ("10.213.7.1", "10.213.7.2")

    def __init__(self) -> None:
        name = f"st{os.getpid()}n{next(_COUNT)}"
        self._spaces = (f"{name}a", f"{name}b")
        self._cards = (f"{name}u", f"{name}v")

    def __enter__(self) -> Cable:
        try:
            for space in self._spaces:
                _do("netns", "add", space)
            first, second = self._cards
            _do("link", "add", first, "type", "veth", "peer", "name", second)
            for space, card, host in zip(self._spaces, self._cards, self.hosts, strict=True):
                _do("link", "set", card, "netns", space)
                _do("-n", space, "addr", "add", f"{host}/24", "dev", card)
                _do("-n", space, "link", "set", "lo", "up")
                _do("-n", space, "link", "set", card, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        _ip(["link", "del", self._cards[0]])  # where it has not got into a namespace
        for space in self._spaces:
            _ip(["netns", "del", space])

    def inside(self) -> dict[int, Sequence[str]]:
        """What stands before a command, so that it runs at an end."""
        return {i: ("ip", "netns", "exec", space) for i, space in enumerate(self._spaces)}

    def cut(self) -> None:
        """Takes the cable out, at the second end."""
        _do("-n", self._spaces[1], "link", "set", self._cards[1], "down")

    def mend(self) -> None:
        """Puts it back."""
        _do("-n", self._spaces[1], "link", "set", self._cards[1], "up")


def _do(*arguments: str) -> None:
    done = _ip(arguments)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def _ip(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
