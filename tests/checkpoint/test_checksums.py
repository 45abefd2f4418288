"""All that compute CRC-32 give the same value, and what is not installed is not needed."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator

import pytest

from easymp.checkpoint.blocks import crc32

MODULES = ["isal.isal_zlib", "zlib_ng.zlib_ng"]


@pytest.fixture(autouse=True)
def _chosen_anew() -> Iterator[None]:
    crc32.cache_clear()
    yield
    crc32.cache_clear()


@pytest.mark.parametrize("module", [*MODULES, None])
def test_all_give_the_same_value(monkeypatch: pytest.MonkeyPatch, module: str | None) -> None:
    if module is not None:
        pytest.importorskip(module)
    for other in MODULES:
        if other != module:
            monkeypatch.setitem(sys.modules, other, None)
    data = bytes(range(256)) * 1000
    assert crc32().__module__ in ((module or "zlib"), (module or "zlib").rpartition(".")[2])
    for view in (b"", data, memoryview(data)[3:77_777], memoryview(bytearray(data))):
        assert crc32()(view, 0) == zlib.crc32(view) and crc32()(view, 123) == zlib.crc32(view, 123)
