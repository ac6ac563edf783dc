"""A ps or worker task of TensorFlow; TF_CONFIG says which."""

from __future__ import annotations

import json
import os

import ps_tasks
import tensorflow as tf


def main() -> None:
    config = json.loads(os.environ["TF_CONFIG"])
    options = tf.compat.v1.ConfigProto()
    # As TF's tutorial does it: fewer threads than closures that wait on a ps stop a small machine.
    options.inter_op_parallelism_threads = max(
        os.cpu_count() or 1, len(config["cluster"]["worker"]) + 1
    )
    server = tf.distribute.Server(
        config["cluster"],
        job_name=config["task"]["type"],
        task_index=config["task"]["index"],
        protocol="grpc",
        config=options,
    )
    assert server.target
    ps_tasks.end_with_parent()
    os._exit(0)  # a server of TensorFlow has no other end


if __name__ == "__main__":
    main()
