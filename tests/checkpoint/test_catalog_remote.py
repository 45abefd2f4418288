"""All that is said of checkpoints on this machine holds for those behind a URL."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from easymp import CheckpointError
from easymp.checkpoint import codec, diff, inspect, list_checkpoints, merge, prune, verify

OF_ONE, OF_TWO = "step-00000002", "step-00000003"
MODEL = "model-00001-of-00002.safetensors"


@pytest.fixture
def bucket(samples: Path) -> Iterator[str]:
    """The samples, in a store that lies in memory."""
    memory = fsspec.filesystem("memory")
    for file in samples.rglob("*"):
        if file.is_file():
            memory.pipe_file(f"/bucket/runs/{file.relative_to(samples)}", file.read_bytes())
    yield "memory://bucket/runs"
    memory.rm("/bucket", recursive=True)


def test_listed_inspected_and_verified(samples: Path, bucket: str) -> None:
    here, there = list_checkpoints(samples), list_checkpoints(bucket)
    assert here == there
    assert inspect(f"{bucket}/{OF_TWO}").tensors == inspect(samples / OF_TWO).tensors
    assert verify(f"{bucket}/{OF_TWO}") == []
    memory = fsspec.filesystem("memory")
    path = f"/bucket/runs/{OF_TWO}/{MODEL}"
    text = bytearray(memory.cat_file(path))
    text[-1] ^= 1
    memory.pipe_file(path, bytes(text))
    (damage,) = verify(f"{bucket}/{OF_TWO}")
    assert (damage.file, damage.block) == (MODEL, 0)
    memory.rm(path)
    (damage,) = verify(f"{bucket}/{OF_TWO}")
    assert damage.why == "is missing"
    with pytest.raises(CheckpointError):
        verify(f"{bucket}/none")


def test_compared_and_merged_across(samples: Path, bucket: str, tmp_path: Path) -> None:
    assert diff(samples / OF_TWO, f"{bucket}/{OF_TWO}").same
    merge(f"{bucket}/{OF_TWO}", tmp_path / "whole", all=True)
    merge(samples / OF_TWO, f"{bucket}/whole", all=True)
    assert diff(tmp_path / "whole", f"{bucket}/whole").same
    merge(samples / OF_TWO, f"{bucket}/weights")
    assert fsspec.filesystem("memory").isfile("/bucket/runs/weights/model.safetensors")


def test_pruned(bucket: str) -> None:
    memory = fsspec.filesystem("memory")
    memory.rm(f"/bucket/runs/{OF_ONE}/COMMIT")
    assert prune(bucket, keep=1).removed == ()
    memory.copy(f"/bucket/runs/{OF_TWO}", "/bucket/runs/step-00000004", recursive=True)
    found = prune(bucket, keep=1)
    assert (found.kept, found.removed) == (("step-00000004",), (OF_TWO,))
    assert [(e.name, e.newest) for e in list_checkpoints(bucket)] == [
        (OF_ONE, False),
        ("step-00000004", True),
    ]


def test_what_a_dead_writer_left_goes_and_what_nobody_claims_stays(bucket: str) -> None:
    memory = fsspec.filesystem("memory")
    for step in (OF_ONE, "step-00000009"):
        memory.pipe_file(f"/bucket/runs/{step}/{MODEL}", b"half")
    memory.rm(f"/bucket/runs/{OF_ONE}/COMMIT")
    dead = codec.dumps({"host": socket.gethostname(), "pid": 2**31 - 1, "folder": "step-00000009"})
    memory.pipe_file("/bucket/runs/.tmp-step-00000009.lock", dead)
    found = prune(bucket, keep=1)
    assert (found.removed, found.left_over, found.busy) == ((), ("step-00000009",), ())
    assert [e.name for e in list_checkpoints(bucket)] == [OF_ONE, OF_TWO]
