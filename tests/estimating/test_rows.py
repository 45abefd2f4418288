"""Rows of estimates: what is combined, what fits, and what is suggested, on machines that are written down."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from easymp.cli.estimating import Estimates, Sized, estimates, read_model
from easymp.errors import BatchError, PrepareError, SettingError
from easymp.hardware import Hardware
from easymp.training.memory import SPARE, estimate

from ..hardware.machines import MACHINES

EIGHT, VOLTA, SERVER, LAPTOP = (
    MACHINES[name] for name in ("8xH100", "V100", "Sapphire Rapids", "laptop CPU")
)
GB = 10**9


def found(text: str, machine: Hardware = EIGHT, **asked: Any) -> Estimates:
    return estimates(read_model(text), machine, **asked)


def rows(it: Estimates) -> list[tuple[int, str, str]]:
    return [(row.need.world, row.need.strategy, row.need.precision) for row in it.rows]


def test_rows_are_those_of_the_arithmetic() -> None:
    sized = read_model("350M")
    it = estimates(sized, EIGHT, [1, 8], optimizer="sgd")
    assert rows(it) == [
        *[(1, "single", p) for p in ("fp32", "bf16")],
        *[(8, s, p) for s in ("ddp", "zero1", "fsdp") for p in ("fp32", "bf16")],
    ]
    for row in it.rows:
        need = estimate(
            sized.model,
            strategy=row.need.strategy,
            precision=row.need.precision,
            world=row.need.world,
            optimizer="sgd",
        )
        assert row.need == need
        assert row.available == EIGHT.devices[0].memory
        assert row.spare == int(row.available * (1 - SPARE)) - need.total and row.fits == (row.spare >= 0)


@pytest.mark.parametrize(
    ("text", "machine", "asked", "words"),
    [
        (
            "1.5B",
            EIGHT,
            {},
            "ddp on 8 with bf16 fits with 38.3 GiB to spare; the fewest processes are 1, by single on 1 with bf16",
        ),
        ("7B", EIGHT, {}, "fsdp on 8 with bf16 fits with"),
        ("7B", EIGHT, {"optimizer": "sgd", "processes": [2]}, "on 2 with"),
        ("70B", EIGHT, {"processes": [8]}, "nothing fits: fsdp on 8 with bf16 comes nearest"),
        ("70B", EIGHT, {"processes": [64]}, "fsdp on 64 with bf16 fits"),
        ("350M", VOLTA, {"processes": [1]}, "single on 1 with fp16 fits"),
        ("350M", LAPTOP, {"processes": [1]}, "single on 1 with fp32 fits"),
        ("350M", SERVER, {"processes": [1]}, "single on 1 with bf16 fits"),
        (
            "7B",
            LAPTOP,
            {"memory": 80 * GB, "processes": [8]},
            "fsdp on 8 with bf16 fits with 44.6 GiB to spare",
        ),
    ],
)
def test_what_is_suggested(text: str, machine: Hardware, asked: dict[str, Any], words: str) -> None:
    assert words in found(text, machine, **asked).suggestion


def test_processes_of_a_cpu_share_its_memory_and_devices_do_not() -> None:
    assert {row.need.world: row.available for row in found("1M", SERVER).rows} == {
        n: SERVER.cpu.memory // n for n in (1, 2, 4, 8)
    }
    assert {row.available for row in found("1M", EIGHT, processes=[1, 16]).rows} == {EIGHT.devices[0].memory}
    assert {row.available for row in found("1M", EIGHT, processes=[1], cpu=True).rows} == {EIGHT.cpu.memory}
    assert {row.available for row in found("1M", EIGHT, memory=5 * GB).rows} == {5 * GB}


def test_what_cannot_be_had_is_left_out_and_said_where_it_was_asked_for() -> None:
    it = found("1M", VOLTA, precisions=["fp32", "bf16", "half"])
    assert {row.need.precision for row in it.rows} == {"fp32", "fp16"}
    assert it.refused[0].startswith("bf16: ")
    assert {row.need.precision for row in found("1M", VOLTA).rows} == {"fp32", "fp16"} and not found(
        "1M", VOLTA
    ).refused
    elsewhere = found(
        "1M",
        VOLTA,
        precisions=["bf16", "fp8"],
        memory=GB,
        processes=[2],
        strategies=["fsdp", "tensor_parallel"],
    )
    assert rows(elsewhere) == [(2, "fsdp", "bf16"), (2, "fsdp", "fp8"), (2, "tensor_parallel", "bf16")]
    assert elsewhere.refused[0].startswith(
        "tensor_parallel on 2 with fp8: the layers of fp8 take whole tensors"
    )
    alone = found("1M", strategies=["single", "fsdp"], processes=[1, 2])
    assert rows(alone)[0] == (1, "single", "fp32") and [r.split(":")[0] for r in alone.refused] == [
        "fsdp on 1",
        "single on 2",
    ]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"optimizer": "adamx"}, "what the optimizer 'adamx' keeps is not known"),
        ({"sample": (torch.empty(1),)}, "activations need a forward, and 1M has none"),
        ({"activation_checkpointing": True}, "activation checkpointing changes activations"),
        ({"options": {"cpu_offload": True}}, "options are one strategy's"),
        ({"options": {"cpu_ofload": True}, "strategies": ["fsdp"], "processes": [2]}, "cpu_ofload"),
        ({"strategies": ["single"], "processes": [2]}, "nothing is left to estimate: single on 2"),
    ],
)
def test_what_is_wrong_is_said(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        found("1M", **asked)


def test_options_of_a_strategy_and_ranks_of_a_node() -> None:
    held, offloaded = (
        found("10M", strategies=["fsdp"], processes=[2], options=o).rows[0].need
        for o in (None, {"cpu_offload": True})
    )
    assert offloaded.weights == 0 < held.weights
    near, far = (found("10M", strategies=["hsdp"], processes=[8], per_node=n).rows[0].need for n in (2, 8))
    assert near.weights > 3 * far.weights


def test_activations_of_a_batch_are_counted_once_a_precision() -> None:
    class Once(torch.nn.Module):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Once.calls += 1
            return self.layer(x).relu()

    sized = Sized("mine", Once(), 64 * 65, True)
    it = estimates(sized, EIGHT, [1, 2, 4], sample=(torch.empty(32, 64, device="meta"),))
    assert Once.calls == 2
    assert {row.need.activations for row in it.rows if row.need.precision == "fp32"} == {2 * 32 * 64 * 4}
    assert not any("activations" in note for note in it.notes)
    assert any("--input" in note for note in estimates(sized, EIGHT, [1]).notes)
    with pytest.raises(BatchError, match="cannot be followed"):
        estimates(sized, EIGHT, sample=(torch.empty(32, 63, device="meta"),))
    with pytest.raises(PrepareError, match="has none"):
        estimates(sized, EIGHT, sample=(torch.empty(32, 64, device="meta"),), activation_checkpointing=True)
