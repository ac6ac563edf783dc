"""What the metadata server of a Cloud TPU VM says of the slice, where no variable does.

https://cloud.google.com/compute/docs/metadata/querying-metadata: plain HTTP with a header, answered
by the host of the virtual machine itself.
"""

from __future__ import annotations

import logging
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

ENDPOINTS, NUMBER, TYPE = "worker-network-endpoints", "agent-worker-number", "accelerator-type"

_PRODUCT = Path("/sys/class/dmi/id/product_name")
_SERVER = "metadata.google.internal"
_ADDRESS = "GCE_METADATA_IP"  # another address of it; JAX reads this variable too
_SKIP = "TPU_SKIP_MDS_QUERY"  # as in JAX
_SECONDS = 3.0

_log = logging.getLogger("stratagem")


def read(env: Mapping[str, str]) -> dict[str, str]:
    """The attributes above that there are; none where this is no virtual machine of Google's.

    Args:
        env: the environment variables.
    """
    try:
        if _SKIP in env or "Google" not in _PRODUCT.read_text():
            return {}
    except OSError:
        return {}
    found = {}
    for key in (ENDPOINTS, NUMBER, TYPE):
        try:
            value = _attribute(env.get(_ADDRESS, _SERVER), key)
        except OSError as error:
            _log.warning(
                "Expected the metadata server to say whether this machine is one of a TPU slice. "
                "Got %s from %s. It is taken to be alone; else set TPU_WORKER_HOSTNAMES and "
                "TPU_WORKER_ID.", error, env.get(_ADDRESS, _SERVER),
            )  # fmt: skip
            return {}
        if value:
            found[key] = value
    return found


def _attribute(server: str, key: str) -> str:
    """An attribute of this machine, empty where it has none."""
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{key}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    # No proxy stands between a machine and its own metadata.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_SECONDS) as answer:
            return answer.read().decode().strip()
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 404:
            return ""
        raise
