"""An S3 server on this machine, for what is said about object stores."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import fsspec
import pytest


@pytest.fixture(scope="session")
def _s3_server() -> Iterator[str]:
    """The address of an S3 server on this machine, with a bucket named "bucket". A process of its own: it keeps files open."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT")).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline, "the S3 server does not start"
                time.sleep(0.05)
        yield address
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def s3(_s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket's URL, and fsspec knows where it is."""
    no_idle_sockets = {"connector_args": {"force_close": True, "keepalive_timeout": None}}
    options = {"endpoint_url": _s3_server, "key": "k", "secret": "s", "config_kwargs": no_idle_sockets}
    monkeypatch.setitem(fsspec.config.conf, "s3", options)
    return "s3://bucket"
