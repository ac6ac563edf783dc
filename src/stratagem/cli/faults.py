"""What is wrong with the options of `stratagem run`: all of it, before anything is started."""

from __future__ import annotations

import argparse
from pathlib import Path

from stratagem.launcher.abstract import LaunchError
from stratagem.launcher.hosts import parse_hosts

# Options that only some engines know what to do with.
_ONLY_ON = {
    "image": ("kubernetes",),
    "name": ("slurm", "kubernetes"),
    "output": ("slurm", "kubernetes"),
    "hosts": ("local",),
    "min_workers": ("local", "ray"),
    "wait_for_replacement": ("local", "ray"),
}


def faults(options: argparse.Namespace) -> list[str]:
    """A sentence for each fault: what was expected, what was got, what to do."""
    return [
        *_numbers(options),
        *_script(options),
        *_recovery(options),
        *_engine(options),
        *_hosts(options),
        *_state(options),
    ]


def _numbers(options: argparse.Namespace) -> list[str]:
    least = {
        "workers": 1,
        "ps": 0,
        "devices_per_worker": 1,
        "gpus_per_worker": 1,
        "max_restarts": 0,
        "wait_for_replacement": 0,
        "grace": 0,
    }
    found = [
        f"{_flag(name)}: expected at least {number}. Got {value:g}."
        for name, number in least.items()
        if (value := getattr(options, name)) is not None and value < number
    ]
    if options.devices_per_worker is not None and options.gpus_per_worker is not None:
        found.append(
            "expected --devices-per-worker (virtual CPU devices) or --gpus-per-worker (GPUs). Got "
            "both. Leave one out."
        )
    return found


def _script(options: argparse.Namespace) -> list[str]:
    # In a container or on another machine the file may be where it is not here.
    if options.module or options.on == "kubernetes" or Path(options.script).is_file():
        return []
    what = "a directory" if Path(options.script).is_dir() else "no such file"
    return [
        f"expected a Python file to run. Got {options.script!r}, {what} in {Path.cwd()}. Correct "
        "the path, or run a module with -m; options of stratagem run come before the script."
    ]


def _recovery(options: argparse.Namespace) -> list[str]:
    found = []
    workers = options.workers + (options.chief or options.ps > 0)
    if options.min_workers is not None and not 1 <= options.min_workers <= workers:
        found.append(
            f"--min-workers: expected 1 to {workers}, the number of workers and chief. Got "
            f"{options.min_workers}."
        )
    if options.wait_for_replacement is not None:
        if options.min_workers is None:
            found.append(
                "--wait-for-replacement: expected --min-workers with it, for only survivors that "
                "go on can wait. Got none. Add --min-workers 1, or leave it out."
            )
        if not options.max_restarts:
            found.append(
                "--wait-for-replacement: expected --max-restarts of at least 1, for a replacement "
                "counts as a restart. Got 0."
            )
    if options.min_workers is not None and options.hosts is not None:
        found.append(
            "--min-workers: expected one machine, or an engine that knows them all. Got --hosts, "
            "where each machine sees the end of its own tasks only. Leave out --min-workers; "
            "--max-restarts works with --hosts."
        )
    if options.min_workers is not None and options.ps:
        found.append(
            "--min-workers: expected no parameter servers, which do not need it: their workers "
            f"are independent. Got --ps {options.ps}. Leave one out."
        )
    return found


def _engine(options: argparse.Namespace) -> list[str]:
    found = [
        f"{_flag(name)}: expected --on {' or '.join(engines)} with it. Got --on {options.on}."
        for name, engines in _ONLY_ON.items()
        if getattr(options, name) is not None and options.on not in engines
    ]
    if options.on == "kubernetes" and not options.image:
        found.append(
            "--on kubernetes: expected --image, a container image that has Python, this package "
            "and the script. Got none."
        )
    return found


def _hosts(options: argparse.Namespace) -> list[str]:
    if options.hosts is None:
        missing = "--host-index: expected --hosts with it, the list that it points into. Got none."
        return [missing] if options.host_index is not None else []
    try:
        hosts = parse_hosts(options.hosts)
    except LaunchError as error:
        return [str(error)]
    if options.host_index is not None and not 0 <= options.host_index < len(hosts):
        return [
            f"--host-index: expected 0 to {len(hosts) - 1}, a place in --hosts "
            f"{options.hosts}. Got {options.host_index}."
        ]
    if options.workers < len(hosts):
        return [
            f"--workers: expected at least one for each of the {len(hosts)} machines in --hosts. "
            f"Got {options.workers}. It counts the workers of all machines together."
        ]
    return []


def _state(options: argparse.Namespace) -> list[str]:
    if options.state_dir is not None and not options.ps:
        return [
            "--state-dir: expected --ps with it, for it holds what parameter servers and their "
            "coordinator save. Got none. Leave it out; backups have a directory of their own."
        ]
    if options.ps and options.on == "ray" and options.state_dir is None:
        return [
            "--on ray with --ps: expected --state-dir, a directory that all machines of the "
            "cluster share, for a server may be started again on another one. Got none."
        ]
    if options.on == "kubernetes" and options.state_dir and not options.state_dir.is_absolute():
        return [
            "--state-dir: expected a path from the root, where a volume is mounted in the pods. "
            f"Got {options.state_dir}."
        ]
    return []


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
