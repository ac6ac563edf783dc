"""Which parameter server has an id: ids fall into fixed buckets, and buckets are dealt to servers.

The bucket of an id never changes, so that another number of servers moves whole buckets (the idea
of TorchRec's RFC for dynamic embeddings: id, bucket, shard).
"""

from __future__ import annotations

from collections.abc import Sequence

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


def deal_again(owner: Sequence[int] | np.ndarray, servers: int) -> np.ndarray:
    """The server of each bucket when the number of servers changes: as few move as can be.

    Args:
        owner: `[buckets]`, the server that each bucket is on now.
        servers: how many there are from now on, numbered from 0.

    Returns:
        `[buckets]`. Servers differ by at most one bucket. What stays is on its server.

    Raises:
        ValueError: there are no servers, or fewer buckets than servers.
    """
    new = np.array(owner, np.int64)
    share = np.bincount(deal(servers, len(new)), minlength=servers)
    held = np.bincount(new, minlength=servers)[:servers]
    # The larger shares go to those that have most already.
    share[np.argsort(-held, kind="stable")] = np.sort(share)[::-1]
    homeless = [np.flatnonzero(new >= servers)]
    homeless += [np.flatnonzero(new == s)[share[s] :] for s in range(servers)]
    wanting = np.repeat(np.arange(servers), np.maximum(share - held, 0))
    new[np.sort(np.concatenate(homeless))] = wanting
    return new
