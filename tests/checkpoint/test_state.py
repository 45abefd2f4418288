"""save_state, load_state and resume.

Where checkpoints go, which one is taken, where loops go on, and what is refused.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from easymp import (
    CheckpointError,
    DataLoaderConfiguration,
    ProjectConfiguration,
    RefusedError,
    SettingError,
    StepError,
    checkpoint,
)

from .samples import Holder, Numbered, Small, flip, lineage_of, rewrite


def test_names_follow_updates_and_go_on_after_a_load(tmp_path):
    with Small(tmp_path) as run:
        assert run.acc.project_dir == str(tmp_path)
        run.step()
        run.step()
        path = run.acc.save_state()
        assert path == str(tmp_path / "checkpoints" / "step-00000002")
        weight = run.weight()
        run.step()
    with Small(tmp_path) as run:
        assert run.acc.load_state().place == path
        assert torch.equal(run.weight(), weight)
        assert run.acc.save_state() == path  # the same step again takes its place
        run.step()
        assert run.acc.save_state().endswith("step-00000003")
    names = [entry.name for entry in checkpoint.list_checkpoints(tmp_path / "checkpoints")]
    assert names == ["step-00000002", "step-00000003"]


def test_a_checkpoint_or_the_folder_above_it_is_loaded_by_the_peers_names_too(tmp_path):
    with Small() as run:
        run.acc.save_state(output_dir=tmp_path / "own")
        initial = run.weight()
        for step in (1, 2):
            run.step()
            run.acc.save_state(tmp_path / "all" / f"step-0000000{step}")
        newest = run.weight()
        run.acc.load_state(input_dir=tmp_path / "own")
        assert torch.equal(run.weight(), initial)
        assert run.acc.load_state(tmp_path / "all").place.endswith("step-00000002")
        assert torch.equal(run.weight(), newest)
        with pytest.raises(CheckpointError, match="no checkpoint there"):
            run.acc.load_state(tmp_path / "nowhere")


def test_what_is_refused(tmp_path):
    root = tmp_path / "root"
    for name in ("folder", "empty"):
        (root / name).mkdir(parents=True)
    for name in ("file", "folder/notes.txt"):
        (root / name).write_text("mine")
    with Small(tmp_path, gradient_accumulation_steps=2) as run:
        acc = run.acc
        for message, act in {
            "two names for one thing": lambda: acc.save_state(root / "a", output_dir=root / "b"),
            "runs code": lambda: acc.save_state(safe_serialization=False),
            "hold no pickles": lambda: acc.load_state(acc.save_state(root / "c"), allow_pickle=True),
            "'best.save-2' is not a name for a checkpoint": lambda: acc.save_state(root / "best.save-2"),
            "'.tmp-best' is not a name for a checkpoint": lambda: acc.save_state(root / ".tmp-best"),
            "/file is there and is not a checkpoint .*pass another": lambda: acc.save_state(root / "file"),
            "/folder is there and is not a checkpoint .*pass another": lambda: acc.save_state(root / "folder"),
            "a dict cannot be kept: no state_dict and no load": lambda: acc.register_for_checkpointing({}),
            r"epochs\(-1\) is not a whole number": lambda: acc.epochs(-1),
            "save_on_each_node=True cannot be honoured": lambda: ProjectConfiguration(save_on_each_node=True),
            "total_limit=0": lambda: ProjectConfiguration(total_limit=0),
        }.items():
            with pytest.raises((SettingError, RefusedError, CheckpointError), match=message):
                act()
        acc.load_state(acc.save_state(root / "empty"))
        assert sorted(os.listdir(root)) == ["c", "empty", "file", "folder"]  # no step's name, so no hint
        assert (root / "folder" / "notes.txt").read_text() == (root / "file").read_text() == "mine"
        with acc.accumulate(run.model):
            acc.backward(run.model(torch.randn(4, 12)).sum())
            with pytest.raises(StepError, match="micro-step 1 of 2"):
                acc.save_state()


def test_gradients_that_wait_for_a_step_are_named(tmp_path, caplog):
    with Small(tmp_path) as run:
        run.step()
        run.acc.save_state()
        run.optimizer.zero_grad(set_to_none=False)
        run.acc.save_state()
        assert "gradients wait" not in caplog.text
        run.acc.backward(run.model(torch.randn(4, 12)).sum())
        run.acc.save_state()
        assert "gradients wait" in caplog.text


def damaged(folder: Path, damage: str) -> None:
    manifest = folder / "manifest.json"
    if damage == "uncommitted":
        (folder / "COMMIT").unlink()
    elif damage == "manifest":
        manifest.write_bytes(manifest.read_bytes().replace(b'"step":', b'"stop":', 1))
    else:
        flip(next(folder.glob("model-*.safetensors")), -1)


@pytest.mark.parametrize("how", ["uncommitted", "manifest", "flipped bit"])
def test_resume_leaves_out_what_is_not_whole(tmp_path, how, caplog):
    with Small(tmp_path) as run:
        places = []
        for _ in range(2):
            run.step()
            places.append(run.acc.save_state())
    damaged(Path(places[1]), how)
    with Small(tmp_path) as run:
        assert run.acc.resume() == places[0]
    assert "left out" in caplog.text and "step-00000002" in caplog.text
    damaged(Path(places[0]), how)
    with Small(tmp_path) as run:
        if how == "uncommitted":
            assert run.acc.resume() is None
        else:  # a person should look before the training begins anew
            with pytest.raises(CheckpointError, match="no checkpoint is whole any more"):
                run.acc.resume()


def test_a_checkpoint_of_another_model_is_an_error_and_not_left_out(tmp_path):
    with Small(tmp_path) as run:
        run.acc.save_state()
    with Small(tmp_path, nn.Linear(12, 2)) as run, pytest.raises(CheckpointError, match="nothing has changed"):
        run.acc.resume()


def test_objects_of_the_user_come_back(tmp_path):
    counter = Holder({"best": float("-inf"), "last": torch.arange(3)})
    fresh = Holder({"best": float("inf"), "last": torch.zeros(2)})
    for registered in (counter, fresh):
        with Small(tmp_path) as run:
            run.acc.register_for_checkpointing(registered, nn.Linear(2, 2))
            run.acc.save_state() if registered is counter else run.acc.load_state()
    assert fresh.state["best"] == float("-inf") and fresh.state["last"].tolist() == [0, 1, 2]
    with Small(tmp_path) as run:
        with pytest.raises(CheckpointError, match="object_0"):
            run.acc.load_state()
        assert run.acc.load_state(strict=False).skipped


def test_missing_random_streams_are_an_error_unless_that_is_allowed(tmp_path):
    with Small(tmp_path) as run:
        folder = Path(run.acc.save_state())
        states = json.loads((folder / "manifest.json").read_bytes())["states"]
        states_kept = {name: state for name, state in states.items() if "random" not in name}
        rewrite(folder, lineage_of(folder), states=states_kept)
        with pytest.raises(CheckpointError, match="the random streams of 0 of its 1 ranks"):
            run.acc.load_state()
        assert "random streams of 0 of its 1" in str(run.acc.load_state(strict=False).skipped)


def draw(folder: str, save: bool) -> Any:
    with Small(folder) as run:
        run.acc.save_state() if save else run.acc.load_state()
        return torch.rand(1).item(), random.random()


def test_ranks_that_are_new_draw_something_of_their_own(ranks, tmp_path):
    saved = ranks(draw, str(tmp_path), True, processes=2)
    loaded = ranks(draw, str(tmp_path), False, processes=4)
    assert loaded[:2] == saved
    assert len({drawn for drawn, _ in loaded}) == len({python_drawn for _, python_drawn in loaded}) == 4
    assert ranks(draw, str(tmp_path), False, processes=1) == saved[:1]


def indices(batches: Any) -> list[int]:
    return [int(i) for batch in batches for i in batch[0]]


@pytest.mark.parametrize("with_epoch", [False, True])
def test_the_peers_idiom(tmp_path, with_epoch):
    epochs_read: list[list[int]] = []
    with Small(tmp_path) as run:
        for epoch in range(3):
            run.loader.set_epoch(epoch)
            epochs_read.append([])
            for number, batch in enumerate(run.loader):
                epochs_read[-1] += indices([batch])
                if (epoch, number) == (1, 2):
                    run.acc.save_state()
    for batches, expected in ((3, epochs_read[1][24:]), (1, epochs_read[1][8:]), (0, epochs_read[1][24:])):
        with Small(tmp_path) as run:
            run.acc.load_state()
            if with_epoch:
                run.loader.set_epoch(1)
            assert indices(run.acc.skip_first_batches(run.loader, batches)) == expected
            if with_epoch:
                run.loader.set_epoch(2)
            assert indices(run.loader) == epochs_read[2]


def two_passes(folder: Path, save_at: str = "", load: bool = False) -> list[str]:
    """The places of a script that trains and then validates in each epoch, and saves once."""
    events = []

    def at(epoch: int, stage: str, detail: Any = 0) -> None:
        events.append(f"{epoch} {stage} {detail}")
        if events[-1] == save_at:
            run.acc.save_state()

    with Small(folder) as run:
        test = run.acc.prepare(DataLoader(Numbered(24), 8))
        if load:
            run.acc.load_state()
        for epoch in run.acc.epochs(3):
            at(epoch, "begin")
            for batch in run.loader:
                at(epoch, "train", indices([batch]))
            at(epoch, "between")
            for batch in test:
                at(epoch, "test", indices([batch]))
            at(epoch, "end")
    return events


PLACES = [
    ("1 begin", 0, "1 begin 0"),
    ("1 train", 1, None),
    ("1 train", 4, None),
    ("1 between", 0, "2 begin 0"),
    ("1 test", 0, None),
    ("1 test", 2, None),
    ("1 end", 0, "2 begin 0"),
    ("2 end", 0, "nothing"),
]


def test_epochs_go_on_where_the_save_was(tmp_path):
    straight = two_passes(tmp_path)
    for where, number, first in PLACES:
        place = [line for line in straight if line.startswith(where)][number]
        two_passes(tmp_path / place, place)
        again = two_passes(tmp_path / place, load=True)
        if first is not None:
            assert again == straight[straight.index(first) if first in straight else len(straight) :]
        else:  # the body begins again, with the rest of its passes
            ended = ["1 between 0"] if "test" in where else []
            assert again == ["1 begin 0", *ended, *straight[straight.index(place) + 1 :]]


def test_epochs_is_range_and_loops_are_told_apart(tmp_path):
    with Small(tmp_path) as run:
        assert list(run.acc.epochs(0)) == [] and list(run.acc.epochs(2)) == [0, 1]
        for epoch in run.acc.epochs(4):
            for batch in run.loader:
                run.step(batch)
            if epoch == 1:
                run.acc.save_state()
    with Small(tmp_path) as run:
        run.acc.resume()
        assert [list(run.acc.epochs(n)) for n in (0, 2, 4, 3)] == [[], [], [2, 3], [0, 1, 2]]


def test_a_save_in_another_kind_of_loop_does_not_say_which_epochs_are_left(tmp_path):
    with Small(tmp_path) as run:
        for batch in run.loader:
            run.step(batch)
        run.acc.save_state()
    with Small(tmp_path) as run:
        run.acc.resume()
        with pytest.raises(StepError, match=r"outside of accelerator.epochs\(\)"):
            list(run.acc.epochs(2))


def test_a_load_within_a_pass_ends_it(tmp_path):
    with Small(tmp_path) as run:
        order = indices(run.loader)
        run.loader.set_epoch(0)
        read = []
        for number, batch in enumerate(run.loader):
            read += indices([batch])
            if number == 1:
                run.acc.save_state()
            if number == 3:
                run.acc.load_state()
        assert read == order[:32] and indices(run.loader) == order[16:]


class Died(Exception):
    pass


class Run(Small):
    """A training on two loaders, whose loop says where it is; it dies with the save at the place `at`."""

    def __init__(self, folder, at="", lengths=(12, 12), **options):
        super().__init__(folder, **options)
        loaders = [DataLoader(Numbered(n), 4, shuffle=True) for n in lengths]
        self.a, self.b = self.acc.prepare(*loaders)
        self.events: list[Any] = []
        self._at = at
        self.acc.resume()

    def train(self, *batches: Any) -> None:
        with self.acc.accumulate(self.model):
            for _, x, _ in batches:
                self.acc.backward(self.model(x).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.events += [*(indices.tolist() for indices, *_ in batches), random.random()]
        self.place(f"step {self.optimizer.updates}")

    def place(self, name: str) -> None:
        if name == self._at:
            self.acc.save_state()
            raise Died

    def epochs(self, number: int = 3) -> Any:
        for epoch in self.acc.epochs(number):
            yield epoch
            self.place(f"end {epoch}")


def zipped(run: Run) -> None:
    for _ in run.epochs():
        for batches in zip(run.a, run.b):
            run.train(*batches)


def endless_beside(run: Run) -> None:
    batches_of_b = (batch for _ in count() for batch in run.b)
    for _ in run.epochs():
        for batch in run.a:
            run.train(batch, next(batches_of_b))


def begun_again_when_empty(run: Run) -> None:
    batches_of_b = iter(run.b)
    for _ in run.epochs():
        for batch in run.a:
            try:
                batch_of_b = next(batches_of_b)
            except StopIteration:
                batches_of_b = iter(run.b)
                batch_of_b = next(batches_of_b)
            run.train(batch, batch_of_b)


def a_count_of_steps(run: Run) -> None:
    for epoch in run.epochs():
        batches = iter(run.a)
        while run.optimizer.updates < 2 * epoch + 2:
            run.train(next(batches))


def two_zips(run: Run) -> None:
    for _ in run.epochs(2):
        for _ in range(2):
            for batches in zip(run.a, run.b):
                run.train(*batches)


def plain(run: Run) -> None:
    for _ in run.epochs():
        for batch in run.a:
            run.train(batch)


UNSEEDED = {"dataloader_config": DataLoaderConfiguration(use_seedable_sampler=False)}
WINDOWS = {"gradient_accumulation_steps": 2}
OTHER = {"lengths": (12, 16)}
# A loop, options of a Run, and places; the first one is the most telling.
LOOPS: dict[str, tuple[Callable[[Run], None], dict[str, Any], str]] = {
    "zip": (zipped, {}, "step 3, step 2, end 0, step 6"),
    "zip with a longer one": (zipped, {"lengths": (12, 20)}, "step 3, step 5"),
    "zip with a shorter one": (zipped, {"lengths": (12, 8)}, "step 2, end 1"),
    "an endless one beside": (endless_beside, OTHER, "end 1, step 2, end 0, step 5"),
    "zip in windows": (zipped, {"lengths": (12, 8), **WINDOWS}, "step 1, step 2, step 3"),
    "an endless one in windows": (endless_beside, OTHER | WINDOWS, "step 3, step 1, step 2, end 1"),
    "one that is begun again": (begun_again_when_empty, {"lengths": (12, 8)}, "end 1, step 2, step 3, end 2"),
    "a count of steps": (a_count_of_steps, {}, "step 3, step 1, step 2, end 0, end 1"),
    "two zips": (two_zips, {}, "step 4, step 1, step 3, step 6, end 0"),
    "the sampler's own random order": (plain, UNSEEDED, "step 3, step 2, end 0, step 6"),
}


def life(folder: Path, loop: Callable[[Run], None], at: str = "", **options: Any) -> list[Any]:
    """What it saw until it died, or ended; its weights are last then."""
    with Run(folder, at, **options) as run:
        try:
            loop(run)
        except Died:
            return run.events
        assert not at
        return [*run.events, *run.model.state_dict().values()]


@pytest.mark.parametrize("which", [slice(0, 1), pytest.param(slice(1, None), marks=pytest.mark.slow)])
def test_the_rest_of_the_loop_comes(tmp_path, which):
    for name, (loop, options, places) in LOOPS.items():
        straight = life(tmp_path / name, loop, **options)
        for saved_at in places.split(", ")[which]:
            folder = tmp_path / f"{name}, {saved_at}"
            remaining = straight[len(life(folder, loop, saved_at, **options)) :]
            went_on = life(folder, loop, **options)
            assert [str(event) for event in went_on] == [str(event) for event in remaining], (name, saved_at)
            assert all(torch.equal(*weights) for weights in zip(went_on[-2:], remaining[-2:]))
