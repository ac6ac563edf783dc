"""OneDeviceStrategy: everything on one named device."""

from __future__ import annotations

from stratagem import config
from stratagem.strategies.abstract import Strategy


class OneDeviceStrategy(Strategy):
    """Places variables and computation on one device; collectives are the identity.

    Args:
        device: TF device string such as "/gpu:0" or "CPU:1".

    Raises:
        ValueError: there is no such device.
    """

    def __init__(self, device: str):
        super().__init__([config.resolve_device(device)])
