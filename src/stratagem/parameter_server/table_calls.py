"""Dynamic tables as wholes: all their rows from the servers, and rows set by id."""

from __future__ import annotations

import numpy as np

from stratagem.parameter_server.buckets import BUCKETS, server_of
from stratagem.parameter_server.client import Servers
from stratagem.parameter_server.dtypes import dtype_of
from stratagem.parameter_server.plan import Spec

_AT_ONCE = 64  # buckets in one answer


def items(servers: Servers, spec: Spec) -> tuple[np.ndarray, np.ndarray]:
    """All ids of a dynamic table that have a row, int64 `[n]`, and a variable's rows `[n, ...]`."""
    ids = [np.empty(0, np.int64)]
    rows = [np.empty((0, *spec.shape[1:]), dtype_of(spec.dtype))]
    for low in range(0, BUCKETS, _AT_ONCE):
        fields = {"vid": spec.vid, "low": low, "high": low + _AT_ONCE}
        posts = [servers.post(s, "table", fields) for s in range(len(servers.peers))]
        for answer in servers.wait(posts):
            ids.append(answer.arrays[0])
            rows.append(answer.arrays[1])
    return np.concatenate(ids), np.concatenate(rows)


def put(servers: Servers, spec: Spec, ids: np.ndarray, rows: np.ndarray) -> None:
    """Sets rows of a variable by distinct ids, and makes those that are not there."""
    owners = server_of(ids, len(servers.peers))
    posts = []
    for server in range(len(servers.peers)):
        mine = owners == server
        posts.append(servers.post(server, "put", {"vid": spec.vid}, [ids[mine], rows[mine]]))
    servers.wait(posts)
