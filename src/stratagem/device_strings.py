"""Device strings in the manner of TensorFlow: what they say, before it is known what there is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

KINDS = ("cpu", "gpu", "tpu")
_ALIASES = {"cuda": "gpu", "rocm": "gpu"}  # What str(jax.Device) says for a GPU.

_DEVICE_STRING = re.compile(
    r"((/job:[^/:]+)?(/replica:\d+)?(/task:\d+)?/)?"
    r"((physical_)?device:)?(?P<kind>[a-z][a-z_]*)(:(?P<index>\d+))?",
    re.IGNORECASE,
)


class LogicalDevice(NamedTuple):
    """A device as `tf.config.list_logical_devices` describes it."""

    name: str
    device_type: str


class PhysicalDevice(NamedTuple):
    """A device as `tf.config.list_physical_devices` describes it."""

    name: str
    device_type: str


@dataclass(frozen=True)
class Address:
    """A device string, parsed: kind in lower case, and the index among local devices of it."""

    kind: str
    index: int

    def __str__(self) -> str:
        return f"{self.kind.upper()}:{self.index}"


def kind_of(text: str) -> str:
    """The kind that a word means, in lower case: `"gpu"` for `"CUDA"`."""
    return _ALIASES.get(text.lower(), text.lower())


def parse(name: str) -> Address | None:
    """The address that a device string means, or None where it is malformed."""
    match = _DEVICE_STRING.fullmatch(name.strip())
    if match is None:
        return None
    return Address(kind_of(match["kind"]), int(match["index"] or 0))
