"""Averages of the weights.

What they are, that every engine and strategy keeps the same, and that checkpoints carry them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from easymp import Accelerator, RefusedError, SettingError, StepError, load_weights
from easymp import optim as ours

from ..strategies.models import make, mean_square, train_step, under, whole
from ..strategies.ways import WAYS
from .test_engines import KINDS, SCALE, stepping

DECAY = 0.9


def updates(acc, model, optimizer, steps, clip=True, overflow_step=-1):
    """Each with data of its own number, so that runs can be cut in two."""
    spread = acc._prepared.strategy
    for _ in range(steps):
        generator = torch.Generator().manual_seed(optimizer.updates)
        x = torch.randn(8, 12, generator=generator).chunk(spread.data_size)[spread.data_rank]
        train_step(acc, model, mean_square, x * 1e30 if optimizer.updates == overflow_step else x)
        if clip:
            acc.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p) for name, p in model.named_parameters()}


def averages(acc: Accelerator, model: nn.Module) -> dict[str, Tensor]:
    with acc.averaged():
        return values(model)


def accelerator(label: str = "single", precision: str = "no", **keywords: Any) -> Accelerator:
    keywords = {"ema_decay": DECAY, "cpu": True, "scaler_options": SCALE, **keywords}
    return under(WAYS[label].strategy, dict(WAYS[label].options) or None, 1, precision, **keywords)


@pytest.mark.parametrize(
    ("how", "kind", "clip"), [("memory", "AdamW", True), ("torch", "SGD", True), ("kernels", "AdamW", False)]
)
def test_they_are_the_formulas(kind: str, how: str, clip: bool) -> None:
    with stepping(how), accelerator(fused=how != "memory") as acc:
        model = make("idle")
        model, optimizer = acc.prepare(model, KINDS[kind](model.parameters()))
        expected = values(model)
        for _ in range(4):
            updates(acc, model, optimizer, 1, clip)
            pairs = zip(expected.items(), values(model).values())
            expected = {name: old + (new - old) * (1 - DECAY) for (name, old), new in pairs}
        weights = values(model)
        torch.testing.assert_close(averages(acc, model), expected, rtol=1e-6, atol=1e-7)
        assert all(torch.equal(a, b) for a, b in zip(values(model).values(), weights.values()))
        assert torch.equal(averages(acc, model)["frozen.weight"], weights["frozen.weight"])


@pytest.mark.parametrize("how", ["torch", "kernels"])
def test_a_skipped_step_moves_none(how: str) -> None:
    with stepping(how), accelerator(precision="fp16") as acc:
        model = make("mlp")
        model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        updates(acc, model, optimizer, 2)
        before = averages(acc, model)
        updates(acc, model, optimizer, 1, overflow_step=2)
        assert optimizer.step_was_skipped
        torch.testing.assert_close(averages(acc, model), before, rtol=0, atol=0)


@pytest.mark.parametrize("how", ["torch", "kernels"])
def test_of_masters_they_are_in_fp32(how: str) -> None:
    with stepping(how), accelerator(precision="O2") as acc:
        model = make("mlp")
        model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        updates(acc, model, optimizer, 3)
        masters = [m.clone() for _, m in optimizer.masters]
        assert {state["ema"].dtype for state in optimizer.state.values()} == {torch.float32}
        with acc.averaged(model):
            assert {p.dtype for p in model.parameters()} == {torch.float16}
            model(torch.ones(2, 12))
        for (parameter, master), before in zip(optimizer.masters, masters):
            assert torch.equal(master, before)  # no master took the rounded average for a new weight
            assert torch.equal(parameter, before.half())


def run(label: str, engine: str, folder: str, save: int, load: str | None) -> dict[str, Any]:
    """Four updates, or the rest of four from a checkpoint."""
    with stepping(engine), accelerator(label) as acc:
        model = make("mlp")
        kind = "AdamW" if WAYS[label].adam else "SGD"
        model, optimizer = acc.prepare(model, KINDS[kind](list(model.parameters())))
        if load is not None:
            acc.load_state(load)
        else:
            updates(acc, model, optimizer, save)
            acc.save_state(folder)
        updates(acc, model, optimizer, 4 - save)
        with acc.averaged():
            result = {"ema": values(model)}
            acc.save_model(model, f"{folder}-{label}-{load is not None}")
            with torch.no_grad():
                result["out"] = {"": model(torch.ones(2, 12)).detach()}
        return {**result, "weights": values(model)}


def three_runs(label: str, engine: str, folder: str, single_folder: str) -> list[dict[str, Any]]:
    """From the start, which saves; from the checkpoint of one process; and from the ranks' own."""
    return [run(label, engine, folder, 2, load) for load in (None, single_folder, folder)]


@pytest.mark.parametrize("way", ["zero1", "fsdp"])
def test_under_strategies_and_through_checkpoints(ranks: Any, tmp_path: Path, way: str) -> None:
    engine = "kernels" if list(WAYS).index(way) % 2 else "torch"
    single = run("single", "torch", str(tmp_path / "one"), 2, None)
    ranks_folder, tolerance = str(tmp_path / "several"), {"rtol": 1e-5, "atol": 1e-5}
    args = (way, engine, ranks_folder, str(tmp_path / "one"))
    for results in ranks(three_runs, *args):
        for got in results:
            torch.testing.assert_close(got, single, **tolerance)
    for loaded in (False, True):
        load_weights(loaded_model := make("mlp"), f"{ranks_folder}-{way}-{loaded}")
        torch.testing.assert_close(values(loaded_model), single["ema"], **tolerance)
    resumed = run("single", "torch", str(tmp_path / "back"), 2, ranks_folder)
    torch.testing.assert_close(resumed["ema"], single["ema"], **tolerance)


class Keeper(torch.optim.Optimizer):
    """Remembers something under the same name, which is its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p]["ema"] = p.detach().clone()


@pytest.mark.parametrize("make_one", [torch.optim.AdamW, ours.Lion, Keeper])
def test_a_run_without_averages_drops_those_that_it_loads(make_one, tmp_path, caplog):
    """Nothing would move them, and a run after it would take them for its own."""
    own_state = make_one is Keeper

    def has_averages(states: Any) -> bool:
        return any("ema" in state for state in states.values())

    saved: dict[str, Any] = {}
    for decay in (None if own_state else DECAY, None):
        with accelerator(ema_decay=decay) as acc:
            model = make("mlp")
            model, optimizer = acc.prepare(model, make_one(model.parameters()))
            if saved:
                acc.load_state(tmp_path / "a")
                assert has_averages(optimizer.state) is own_state
                optimizer.load_state_dict(saved)
                assert has_averages(optimizer.state) is own_state
                assert has_averages(saved["state"])  # what was given stays as it was
            updates(acc, model, optimizer, 1)
            saved = saved or optimizer.state_dict()
            acc.save_state(tmp_path / "a")
    messages = [record.message for record in caplog.records if "averages" in record.message]
    assert len(messages) == (not own_state)
    assert own_state or "they are dropped. Accelerator(ema_decay=…) goes on with them" in messages[0]


def test_wrong_calls() -> None:
    with accelerator() as acc:
        model = make("mlp")
        model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters()))
        updates(acc, model, optimizer, 1)
        with acc.averaged():
            with pytest.raises(StepError, match=r"step\(\) inside `with accelerator.averaged\(\):`"):
                optimizer.step()
            with pytest.raises(StepError, match="save after the block"):
                acc.save_state("never")
    with accelerator(ema_decay=None) as acc, pytest.raises(RefusedError, match=r"ema_decay=0\.999"):
        with acc.averaged():
            pass
    for wrong in (-0.1, 1.0, float("nan")):
        with pytest.raises(SettingError, match="ema_decay"):
            accelerator(ema_decay=wrong)
