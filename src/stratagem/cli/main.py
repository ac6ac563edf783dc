"""The command `stratagem`: finds the subcommand, and hands over to its file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from stratagem.cli import doctor, plan, run, serve

# Each has `add_to(subparsers)`, which adds a parser whose default `act` takes the parsed arguments
# and returns the exit code.
_SUBCOMMANDS = (run, serve, doctor, plan)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code. Wrong arguments exit with 2, as argparse does."""
    parser = argparse.ArgumentParser(
        prog="stratagem", description="Distribution strategies for Keras 3 on JAX."
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for subcommand in _SUBCOMMANDS:
        subcommand.add_to(subparsers)
    parsed = parser.parse_args(arguments)
    code: int = parsed.act(parsed)
    return code
