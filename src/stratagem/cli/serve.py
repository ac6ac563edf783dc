"""`stratagem serve`: the program of workers and parameter servers."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from stratagem import config
from stratagem.cluster import tf_config
from stratagem.cluster.keys import Key
from stratagem.cluster.roles import SERVING
from stratagem.cluster.spec import ClusterSpec
from stratagem.coordinator import serving
from stratagem.transport import curve

_USAGE_ERROR = 2  # As argparse exits.
_VARIABLE = "TF_CONFIG"
_DESCRIPTION = """\
Runs a worker or a parameter server (ps): a generic program, the same for all jobs, that serves the
coordinator (chief) of its cluster.

  stratagem serve              the task that TF_CONFIG says, in the cluster that it describes
  stratagem serve --task-type ps --index 1 --cluster cluster.json
"""
_EPILOG = """\
It listens at the address that the cluster has for it, and ends with exit code 0 when the
coordinator says that the job is done, or after SIGTERM. Without STRATAGEM_CLUSTER_KEY, which is the
same secret on all tasks, it listens only where no other machine reaches it.
"""


def add_to(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "serve",
        help="run a worker or a parameter server",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(act=run)
    parser.add_argument("--task-type", choices=SERVING, help="instead of the one in TF_CONFIG")
    parser.add_argument(
        "--index", type=int, metavar="N", help="instead of the one in TF_CONFIG; counts from 0"
    )
    parser.add_argument(
        "--cluster",
        metavar="FILE|JSON",
        help='instead of TF_CONFIG: {"chief": ["a:2222"], "worker": [...], "ps": [...]}',
    )


def run(options: argparse.Namespace) -> int:
    """Runs the parsed command; returns its exit code."""
    try:
        cluster, task_type, index = task_of(options, config.environment())
        address = serving.address_of(cluster, task_type, index)
        key = Key.always(config.environment())
        curve.check_address(address, key, f"{task_type} {index}", "listen")
    except ValueError as error:
        print(f"stratagem serve: error: {error}", file=sys.stderr)
        return _USAGE_ERROR
    print(f"stratagem serve: {task_type} {index} at {address}", file=sys.stderr, flush=True)
    return serving.serve_here(cluster, task_type, index)


def task_of(
    options: argparse.Namespace, environment: Mapping[str, str]
) -> tuple[ClusterSpec, str, int]:
    """The cluster, and which task of it this process is.

    Raises:
        ValueError: what is missing or wrong, and what to do.
    """
    text = environment.get(_VARIABLE) if options.cluster is None else _given(options.cluster)
    read = tf_config.parse(text, options.task_type, options.index)
    if not read.cluster:
        raise ValueError(
            f"expected {_VARIABLE} in the environment, or --cluster. Got "
            f"{'neither' if text is None else 'no tasks in it'}. Give the addresses of all tasks, "
            "as the coordinator's program gets them; `stratagem run --ps` does."
        )
    if read.task_type is None or read.task_id is None:
        raise ValueError(
            f"expected the type and index of this task. Got {read.task_type}, {read.task_id}. Give "
            f'--task-type and --index, or "task": {{"type": "ps", "index": 0}} in {_VARIABLE}.'
        )
    return read.cluster, read.task_type, read.task_id


def _given(text: str) -> str:
    """TF_CONFIG for `--cluster`: JSON, or a file with it; a cluster, or a whole TF_CONFIG."""
    if not text.lstrip().startswith("{"):
        try:
            text = Path(text).read_text()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise ValueError(
                f"--cluster: expected JSON, or a file with it. Got {text!r}: {why}."
            ) from None
    try:
        fields = json.loads(text)
    except json.JSONDecodeError:
        return text  # Which the parser of TF_CONFIG says more about.
    whole = not isinstance(fields, dict) or "cluster" in fields
    return text if whole else json.dumps({"cluster": fields})
