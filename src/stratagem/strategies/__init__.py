"""One file a strategy; abstract.py first."""

from __future__ import annotations

from stratagem.strategies.abstract import Strategy as Strategy
from stratagem.strategies.default import DefaultStrategy as DefaultStrategy
from stratagem.strategies.mirrored import MirroredStrategy as MirroredStrategy
from stratagem.strategies.one_device import OneDeviceStrategy as OneDeviceStrategy
