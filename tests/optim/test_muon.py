"""Muon: torch's steps, the same under every strategy, and resumed on another number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from easymp import SettingError, StepError, TensorParallelOptions
from easymp.optim import Muon, muon

from ..strategies.models import under

HEAD = ("6.*",)
# Where a product's last bit differs (by strategy, or by processor), iterations in bf16 enlarge it. Six steps move an
# element by 0.05.
NEAR: dict[str, Any] = {"rtol": 0, "atol": 5e-3}


def net() -> nn.Module:
    torch.manual_seed(1)
    layers = (nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    return nn.Sequential(nn.Embedding(11, 16), *layers, nn.Linear(16, 11))


def learn(model: nn.Module, optimizers: Any, turns: Any, backward: Any = Tensor.backward) -> None:
    """Each rank has the same batch, so that gradients are those of one process to the last bit."""
    for turn in turns:
        x = torch.randint(11, (64,), generator=torch.Generator().manual_seed(turn))
        backward(nn.functional.cross_entropy(model(x), (x * 3 + 1) % 11))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="an optional package is not installed: a torch with torch.optim.Muon"
)
def test_its_steps_are_torchs() -> None:
    model, torch_model = net(), net()
    parameters = dict(torch_model.named_parameters())
    matrices = [parameters.pop(f"{number}.weight") for number in (1, 3, 4, 5)]
    torch_optimizers = (
        torch.optim.Muon(matrices, lr=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(parameters.values(), lr=0.01, weight_decay=0.0, betas=(0.9, 0.95)),
    )
    learn(model, [muon_of(model)], range(6))
    learn(torch_model, torch_optimizers, range(6))
    torch.testing.assert_close([*model.parameters()], [*torch_model.parameters()], **NEAR)


def muon_of(model: nn.Module) -> Muon:
    return Muon(model, lr=0.02, adamw=HEAD, adamw_lr=0.01, adamw_weight_decay=0.0)


def trained(strategy: str, first: int, last: int, folder: str) -> tuple[list[Tensor], int]:
    """Parameters after these steps, and the matrices that this rank orthogonalised.

    Steps after the first ones follow a resume.
    """
    count, newton_schulz = 0, muon.newton_schulz

    def counted(stack: Tensor, steps: int) -> Tensor:
        nonlocal count
        count += len(stack)
        return newton_schulz(stack, steps)

    with pytest.MonkeyPatch.context() as patch, under(strategy, WAYS.get(strategy), cpu=True) as acc:
        patch.setattr(muon, "newton_schulz", counted)
        model = net()
        model, optimizer = acc.prepare(model, muon_of(model))
        if first:
            acc.load_state(folder)
        learn(model, [optimizer], range(first, last), acc.backward)
        if not first:
            acc.save_state(folder)
        return [value.clone() for value in dict(acc.weights(model)).values()], count


WAYS: dict[str, Any] = {
    **dict.fromkeys(("ddp", "zero1", "fsdp")),
    "tensor_parallel": TensorParallelOptions(plan={"1": "colwise", "3": "rowwise"}),
}


def every_way(folder: str) -> dict[str, Any]:
    return {name: [trained(name, *part, f"{folder}/{name}") for part in ((0, 3), (3, 6))] for name in WAYS}


def test_every_strategy_shares_the_matrices_and_resumes(ranks: Any, tmp_path: Any) -> None:
    single = {turns: trained("single", 0, turns, str(tmp_path / "alone"))[0] for turns in (3, 6)}
    counts: dict[str, list[int]] = {}
    tolerances: dict[str, Any] = {name: {} for name in WAYS} | {"tensor_parallel": NEAR}
    for results in ranks(every_way, str(tmp_path)):
        for name, ((before, matrix_count), (after, _)) in results.items():
            if before:  # weights that are sharded are gathered on the main process only
                for weights, right in ((before, single[3]), (after, single[6])):
                    torch.testing.assert_close(weights, right, **tolerances[name], msg=lambda m, n=name: f"{n}: {m}")
            counts.setdefault(name, []).append(matrix_count)
    counts.pop("tensor_parallel")  # all its ranks work on matrices that they hold whole
    assert all(sorted(matrix_count) == [3, 9] for matrix_count in counts.values()), (
        counts
    )  # of 12: three steps, two of four are alike
    for name in WAYS:  # written by two ranks, read by one
        torch.testing.assert_close(trained("single", 3, 6, str(tmp_path / name))[0], single[6], **tolerances[name])


def test_who_moves_what() -> None:
    def split(*args: Any, **options: Any) -> dict[bool, list[str]]:
        return {g["use_muon"]: g["param_names"] for g in Muon(*args, **options).param_groups}

    model = nn.ModuleDict({"words": nn.Embedding(4, 3), "up": nn.Linear(3, 5), "lm_head": nn.Linear(5, 4)})
    assert split(model)[True] == ["up.weight"]
    assert split(model.named_parameters(), adamw=("words.*",))[True] == ["up.weight", "lm_head.weight"]
    groups = [
        {"params": [model["up"].weight], "use_muon": True, "lr": 0.5},
        {"params": [model["up"].bias], "use_muon": False},
    ]
    by_hand = Muon(groups, lr=0.1, adamw_lr=0.2)
    assert [group["lr"] for group in by_hand.param_groups] == [0.5, 0.2]


def wrong_groups() -> list[tuple[Any, str]]:
    return [
        (lambda: Muon(net().parameters()), "without names: pass the model"),
        (lambda: Muon([{"params": [torch.ones(2, 2)]}]), 'needs "use_muon"'),
        (lambda: Muon([{"params": [torch.ones(2)], "use_muon": True}]), r"shape \(2,\)"),
        (lambda: Muon(net(), lr=-1.0), r"lr=-1\.0"),
        (lambda: Muon(net(), lr="0.1"), r"lr='0\.1'"),
        (lambda: Muon(net(), betas=(0.9, 1.5)), r"betas=\(0\.9, 1\.5\)"),
        (lambda: Muon(net(), momentum=1.0), r"momentum=1\.0"),
        (lambda: Muon(net(), adjust_lr_fn="none"), "not one of original, match_rms_adamw"),
        (lambda: Muon(net(), adamw="head"), "must be a tuple"),
    ]


def test_what_is_wrong_is_named() -> None:
    for call, message in wrong_groups():
        with pytest.raises(SettingError, match=message):
            call()


def test_sparse_gradients_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True))
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(StepError, match="sparse=False"):
        Muon(model).step()
