"""Checksums, threads, and the copy that an asynchronous save writes from."""

from __future__ import annotations

import sys
import threading
import zlib
from collections.abc import Iterator

import pytest
import torch

from easymp.checkpoint import snapshot as of_contents
from easymp.checkpoint.manifest import whole
from easymp.checkpoint.snapshot import Brought, Image, contents, divide
from easymp.checkpoint.storage import crc32, spread

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


def test_the_first_error_is_raised_and_nothing_runs_on() -> None:
    def fail(x: int) -> int:
        if x == 5:
            raise KeyboardInterrupt("five")
        return x

    with pytest.raises(KeyboardInterrupt, match="five"):
        list(spread(fail, range(50), "test"))
    assert not [t for t in threading.enumerate() if t.name == "easymp-test"]


TENSORS = {
    "bools": torch.tensor([True, False, True]),
    "odd": torch.arange(7, dtype=torch.uint8),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "bf16": torch.randn(5, 3).bfloat16(),
    "transposed": torch.randn(40, 30).t(),
    "every other": torch.randn(64, 6)[:, ::2],
    "conjugated": torch.randn(4, 4, dtype=torch.complex64).conj(),
    "fp8": torch.randn(9).to(torch.float8_e4m3fn),
    "long": torch.arange(1000),
    "large": torch.randn(300, 300),
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(of_contents, "CHUNK", 64)
    monkeypatch.setattr(of_contents, "SMALL", 1000)
    monkeypatch.setattr(of_contents, "LARGE", 50_000)


def planned(device="cpu"):
    tensors = {f"model/{name}": tensor.to(device) for name, tensor in TENSORS.items()}
    brought = [Brought(name, t.dtype, tuple(t.shape), whole(tuple(t.shape))) for name, t in tensors.items()]
    (plan,) = divide([brought]).files
    return plan, {(name, whole(tuple(t.shape))): t for name, t in tensors.items()}


def expected(plan, parts):
    full = [parts[at].cpu() for at in plan.contents if parts[at].numel()]
    rows = [part.resolve_conj().contiguous().view(-1).view(torch.uint8) for part in full]
    return plan.header + torch.cat(rows).numpy().tobytes()


@pytest.mark.gpu
def test_a_copy_from_a_gpu_is_of_the_moment_of_the_call():
    plan, parts = planned("cuda")
    right, image = expected(plan, parts), Image()
    for _ in range(3):
        content = image.take([plan], parts)[plan.name]
        kept = {at: tensor.clone() for at, tensor in parts.items()}
        for tensor in parts.values():
            tensor.zero_()  # enqueued behind the copy
        image.wait()
        assert image.memory.is_pinned()
        assert bytes(content) == right
        parts = kept
    assert b"".join(contents(plan, parts)) == right
