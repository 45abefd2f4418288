"""A manifest that says something impossible under a valid seal is refused in bounded time, and changes nothing live."""

from __future__ import annotations

import copy
import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from easymp import Accelerator, CheckpointError, load_weights

WRONG: list[tuple[list[Any], Any]] = [
    (["world_size"], 2**40),
    (["world_size"], 10**7),
    (["step"], 2**64 - 1),
    (["states", "optimizer", "updates"], None),
    (["states", "optimizer", "updates"], [0]),
    (["states", "optimizer", "groups", 0, "lr"], "a"),
    (["states", "optimizer", "groups", 0, "betas", "items"], []),
    (["states", "optimizer/state", "model/0.weight"], True),
    (["states", "optimizer/state", "model/0.weight", "exp_avg"], "a"),
    (["states", "optimizer/state", "model/0.weight", "step"], 2**64 - 1),
    (["states", "state/scheduler_0", "last_epoch"], {}),
    (["states", "state/scheduler_0/behind"], [None, "a"]),
    (["states", "state/each_update"], 3),
    (["states", "state/loader_0", "position"], "a"),
    (["states", "state/run", "iteration"], "a"),
    (["states", "state/epochs", "finished"], "a"),
    (["states", "ranks/00000/state/random", "seed"], "a"),
    (["states", "ranks/00000/state/random", "streams", "devices"], []),
]


class Run:
    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.acc = Accelerator(cpu=True, project_dir=folder, seed=0, log_with="none")
        net = nn.Sequential(nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        data = DataLoader(TensorDataset(torch.randn(12, 4)), batch_size=2, shuffle=True)
        self.model, self.optimizer, self.schedule, self.loader = self.acc.prepare(
            net, optimizer, schedule, data
        )
        for i, (x,) in enumerate(self.loader):
            self.acc.backward(self.model(x).square().mean())
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            if i == 1:
                self.acc.save_state(folder / "saved")
            if i == 3:
                break

    def live(self) -> str:
        torch.set_printoptions(precision=10)
        parts = (self.model, self.optimizer, self.schedule, self.loader)
        run = [part.state_dict() for part in parts]
        try:
            return repr([*run, self.acc.save_iteration, torch.get_rng_state().sum()])
        finally:
            torch.set_printoptions(profile="default")


def reseal(folder: Path, manifest: Any) -> None:
    text = json.dumps(manifest).encode()
    (folder / "manifest.json").write_bytes(text)
    (folder / "COMMIT").write_text(hashlib.sha256(text).hexdigest() + "\n")


@pytest.mark.timeout(60)
def test_what_cannot_be_is_refused_before_anything_live_changes(tmp_path: Path) -> None:
    run, folder = Run(tmp_path), tmp_path / "saved"
    with run.acc:
        real = json.loads((folder / "manifest.json").read_bytes())
        before = run.live()
        for path, value in WRONG:
            manifest = at = copy.deepcopy(real)
            for word in path[:-1]:
                at = at[word]
            assert at[path[-1]] != value
            at[path[-1]] = value
            reseal(folder, manifest)
            with pytest.raises(CheckpointError) as caught:
                run.acc.load_state(folder)
            assert len(str(caught.value)) < 500, path
            assert run.live() == before, path
        reseal(folder, real)
        run.acc.load_state(folder)
        assert run.live() != before


def test_a_header_with_metadata_null_is_read_as_the_library_reads_it(tmp_path: Path) -> None:
    header = json.dumps(
        {"__metadata__": None, "weight": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}}
    ).encode()
    file = tmp_path / "w.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<f", 3.0))
    net = nn.Linear(1, 1, bias=False)
    load_weights(net, file)
    assert net.weight.item() == 3.0
