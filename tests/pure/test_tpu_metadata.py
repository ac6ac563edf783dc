"""A Cloud TPU VM whose environment says nothing: its metadata server does."""

from __future__ import annotations

import http.server
import threading

import pytest

from stratagem.cluster import tpu_metadata
from stratagem.cluster_resolver import TPUClusterResolver

PATH = "/computeMetadata/v1/instance/attributes/"
ONE = {
    "worker-network-endpoints": "w0:1:10.0.0.2,w1:2:10.0.0.3",
    "agent-worker-number": "1",
    "accelerator-type": "v5litepod-8",
}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes a machine of Google's with some attributes; gives its environment."""
    servers = []
    product = tmp_path / "product_name"
    product.write_text("Google Compute Engine\n")
    monkeypatch.setattr(tpu_metadata, "_PRODUCT", product)

    def make(attributes, status=200):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                value = attributes.get(self.path.removeprefix(PATH))
                good = value is not None and self.headers["Metadata-Flavor"] == "Google"
                self.send_response(status if good else 404)
                self.end_headers()
                self.wfile.write((value or "").encode())

            def log_message(self, *arguments):
                pass

        server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        servers.append((server, thread))
        return {"GCE_METADATA_IP": f"127.0.0.1:{server.server_port}"}

    yield make
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("tpu", [None, "my-tpu"])
def test_a_slice_of_two_hosts(machine, tpu):
    resolver = TPUClusterResolver(tpu, env=machine(ONE))
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.2:8470", "10.0.0.3:8470"]}
    assert resolver.workers().task_id == 1
    assert resolver.accelerator_type == "v5litepod-8"
    assert "of the metadata server" in resolver.found


def test_names_of_hosts(machine):
    resolver = TPUClusterResolver(env=machine({**ONE, "worker-network-endpoints": "a, b"}))
    assert resolver.cluster_spec().as_dict() == {"worker": ["a:8470", "b:8470"]}


def test_variables_come_first(machine):
    env = {**machine(ONE), "TPU_WORKER_HOSTNAMES": "c,d", "TPU_WORKER_ID": "0"}
    assert TPUClusterResolver(env=env).cluster_spec().as_dict() == {"worker": ["c:8470", "d:8470"]}


@pytest.mark.parametrize("more", [{}, {"TPU_SKIP_MDS_QUERY": "1"}])
def test_a_machine_without_a_slice_or_that_is_not_to_be_asked(machine, more):
    env = {**machine(ONE if more else {}), **more}
    assert TPUClusterResolver(env=env).cluster_spec().as_dict() == {}


def test_other_machines_are_not_asked(machine, tmp_path):
    env = machine(ONE)
    tpu_metadata._PRODUCT.write_text("Standard PC")
    assert tpu_metadata.read(env) == {}
    tpu_metadata._PRODUCT.unlink()
    assert tpu_metadata.read(env) == {}


def test_a_number_that_is_none(machine):
    with pytest.raises(ValueError, match=r"agent-worker-number: expected the place.* Got 'one'"):
        TPUClusterResolver(env=machine({**ONE, "agent-worker-number": "one"}))


def test_a_server_that_fails_is_told(machine, caplog):
    assert TPUClusterResolver(env=machine(ONE, status=503)).cluster_spec().as_dict() == {}
    (record,) = caplog.records
    text = record.getMessage()
    assert "metadata server to say whether this machine is one of a TPU slice. Got HTTP" in text
    assert "HTTP Error 503" in text
    assert "set TPU_WORKER_HOSTNAMES and TPU_WORKER_ID" in text
