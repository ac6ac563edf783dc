"""The two short notations in which Slurm names the nodes of a step and counts their tasks."""

from __future__ import annotations

import itertools
import re

_PART = re.compile(r"(?:[^\s,\[\]]+|\[[^\[\]]*\])+")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def expand_hostlist(hostlist: str) -> list[str]:
    """`"t02n[13,41],t1"` -> `["t02n13", "t02n41", "t1"]`, in the order given.

    Leading zeros stay, and a name may have several brackets.

    Raises:
        ValueError: the list is malformed.
    """
    if re.fullmatch(f"{_PART.pattern}(,{_PART.pattern})*", hostlist) is None:
        raise _malformed(hostlist, "expected names such as n1 and n[1-2,07], with commas between")
    hosts: list[str] = []
    for part in _PART.findall(hostlist):
        pieces = [
            [name] if name else _numbers(ranges, hostlist) for ranges, name in _PIECE.findall(part)
        ]
        hosts += map("".join, itertools.product(*pieces))
    return hosts


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """`"2,1(x2)"` -> `[2, 1, 1]`: the tasks of each node, in the order of the host list.

    Raises:
        ValueError: the list is malformed.
    """
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise ValueError(
                f"Invalid tasks-per-node list format {tasks_per_node!r}: expected numbers such as "
                f"2 and 1(x2), with commas between. Got {part!r}."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _numbers(ranges: str, hostlist: str) -> list[str]:
    numbers: list[str] = []
    for text in ranges.split(","):
        match = _RANGE.fullmatch(text)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise _malformed(hostlist, f"expected numbers such as 3 and 3-5 in [{ranges}]")
        first, last = int(match[1]), int(match[2] or match[1])
        numbers += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return numbers


def _malformed(hostlist: str, why: str) -> ValueError:
    return ValueError(f"Invalid hostlist format {hostlist!r}: {why}.")
