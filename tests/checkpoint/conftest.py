"""Fixtures: an S3 server on this machine, for what is said about object stores, and checkpoints of real trainings."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import fsspec
import pytest

from .samples import root as root
from .samples import samples as samples

# At a port of the system's own choice, which is said: one that was looked for before could be somebody else's by now.
SERVE = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.disable()
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session")
def _s3_server() -> Iterator[str]:
    """The address of an S3 server on this machine, with a bucket named "bucket".

    A process of its own: it keeps files open.
    """
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    with subprocess.Popen(
        [sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            address = f"http://127.0.0.1:{int(server.stdout.readline())}"
            urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT")).close()
            yield address
        finally:
            server.kill()


@pytest.fixture
def s3(_s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket's URL, and fsspec knows where it is."""
    no_idle_sockets = {"connector_args": {"force_close": True, "keepalive_timeout": None}}
    options = {"endpoint_url": _s3_server, "key": "k", "secret": "s", "config_kwargs": no_idle_sockets}
    monkeypatch.setitem(fsspec.config.conf, "s3", options)
    return "s3://bucket"
