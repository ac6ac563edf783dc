"""Makes the strategy and nothing else; the argument is the deadline in seconds."""

from __future__ import annotations

import sys

import stratagem
from stratagem.collectives import CommunicationOptions

options = CommunicationOptions(timeout_seconds=float(sys.argv[1]))
stratagem.MultiWorkerMirroredStrategy(communication_options=options)
