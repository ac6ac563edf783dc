"""A ps or worker task of Stratagem; TF_CONFIG says which."""

from __future__ import annotations

import json
import os

import ps_tasks

import stratagem


def main() -> None:
    config = json.loads(os.environ["TF_CONFIG"])
    task = config["task"]
    server = stratagem.distribute.Server(
        config["cluster"], job_name=task["type"], task_index=task["index"]
    )
    ps_tasks.end_with_parent()
    server.stop()


if __name__ == "__main__":
    main()
