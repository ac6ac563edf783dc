"""Which parameter server has an id: ids fall into fixed buckets, and buckets are dealt to servers.

The bucket of an id never changes, so that another number of servers moves whole buckets (the idea
of TorchRec's RFC for dynamic embeddings: id, bucket, shard).
"""

from __future__ import annotations

import numpy as np

from stratagem.parameter_server.index import mix

BUCKETS = 1024


def bucket_of(ids: np.ndarray, buckets: int = BUCKETS) -> np.ndarray:
    """The bucket of each id (int64), below `buckets`, as int64."""
    return (mix(ids) % np.uint64(buckets)).astype(np.int64)


def deal(servers: int, buckets: int = BUCKETS) -> np.ndarray:
    """The server of each bucket, `[buckets]`: the buckets that no server had yet.

    Raises:
        ValueError: there are no servers, or fewer buckets than servers.
    """
    if not 0 < servers <= buckets:
        raise ValueError(
            f"Expected between 1 and {buckets} parameter servers for {buckets} buckets. Got "
            f"{servers}. Use fewer servers or more buckets."
        )
    return np.arange(buckets) % servers


def server_of(ids: np.ndarray, servers: int) -> np.ndarray:
    """The server of each id."""
    return deal(servers)[bucket_of(ids)]
