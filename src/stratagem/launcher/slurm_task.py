"""What `srun` starts once for each task: finds out which task it is, and becomes the program.

python -m stratagem.launcher.slurm_task train.py ARGUMENT ...
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence

from stratagem import config
from stratagem.cluster import SlurmClusterResolver
from stratagem.launcher.abstract import TF_CONFIG, Task, tf_config
from stratagem.launcher.slurm import JOBS, OWN_GPUS


def environment_of_task(environment: Mapping[str, str]) -> dict[str, str]:
    """TF_CONFIG of the task that an environment of Slurm belongs to, and its GPUs.

    Raises:
        RuntimeError, ValueError: the environment is not that of a task; see
            `SlurmClusterResolver`.
    """
    jobs = json.loads(environment[JOBS])
    gpus: dict[str, str] = {}
    if OWN_GPUS in environment:  # Nothing to share out.
        resolver = SlurmClusterResolver(
            jobs, gpus_per_node=0, gpus_per_task=0, auto_set_gpu=False, env=environment
        )
    else:
        resolver = SlurmClusterResolver(
            jobs,
            env=environment,
            set_visible_gpus=lambda visible: gpus.update(CUDA_VISIBLE_DEVICES=visible),
        )
    cluster = resolver.cluster_spec()
    task = Task(str(resolver.task_type), int(resolver.task_id or 0))
    addresses = {job: list(filter(None, cluster.job_tasks(job))) for job in cluster.jobs}
    return {TF_CONFIG: tf_config(addresses, task), **gpus}


def main(program: Sequence[str]) -> None:
    """Becomes the program."""
    environment = config.environment()
    told = environment_of_task(environment)
    os.execve(sys.executable, [sys.executable, *program], {**environment, **told})


if __name__ == "__main__":
    main(sys.argv[1:])
