"""Makes helpers of these tests importable: tests are collected without a package of their own."""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = str(Path(__file__).parents[1])
if _TESTS not in sys.path:
    sys.path.insert(0, _TESTS)
