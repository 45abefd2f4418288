"""save_model, get_state_dict, save and load: the files that Hugging Face's tools read, from every strategy, and never half of a model."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import easymp
from easymp import CheckpointError, RefusedError, SettingError, load_weights
from easymp.checkpoint.storage_local import LocalStorage

from .strategies.models import BATCH, make, mean_square, train_step, under
from .strategies.models import whole as full
from .strategies.ways import WAYS

State = dict[str, Tensor]
INDEX = "model.safetensors.index.json"
SHARDED, ONE_FILE = 2000, 10**6  # max_shard_size


@pytest.fixture
def acc():
    with under(cpu=True) as accelerator:
        yield accelerator


def read(folder: Path) -> State:
    """All tensors of a folder, by the safetensors library."""
    if not (folder / INDEX).exists():
        return load_file(folder / "model.safetensors")
    table = json.loads((folder / INDEX).read_text())["weight_map"]
    files = {file: load_file(folder / file) for file in set(table.values())}
    return {name: files[file][name] for name, file in table.items()}


def filled(value: float) -> nn.Module:
    """The "mlp", with this value in its first weight."""
    model: Any = make("mlp")
    nn.init.constant_(model[0].weight, value)
    return model


def equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[name]) for name, t in one.items())


def loaded(place: Any) -> State:
    """The weights that the "mlp" takes from there."""
    model = filled(0)
    load_weights(model, place)
    return model.state_dict()


@contextmanager
def disk(**operations: Any):
    """Local files whose operations are these, made of the real ones."""
    with pytest.MonkeyPatch.context() as patch:
        for name, wrap in operations.items():
            patch.setattr(LocalStorage, name, wrap(getattr(LocalStorage, name)))
        yield


# -- every strategy ----------------------------------------------------------------------------------------------------


def export(label: str, kinds: tuple[str, ...], folder: str) -> list[tuple[State, State]]:
    """For each kind of model, after a step: the result of get_state_dict, and the live tensors of this rank; save_model writes it."""
    way = WAYS[label]
    found = []
    for kind in kinds:
        with under(way.strategy, {**way.options, **way.more.get(kind, {})}, timeout=30) as acc:
            given = make(kind)
            model, optimizer = acc.prepare(given, torch.optim.SGD(given.parameters(), lr=0.05))
            spread = acc._prepared.strategy
            x = torch.randn(BATCH, 12, generator=torch.Generator().manual_seed(1))
            train_step(acc, model, mean_square, x.chunk(spread.data_size)[spread.data_rank])
            optimizer.step()
            acc.save_model(model, Path(folder, kind), max_shard_size=SHARDED)
            state = {name: t.clone() for name, t in acc.get_state_dict(model).items()}
            live = [*model.named_parameters(), *(model.named_buffers() if acc.is_main_process else ())]
            found.append((state, {name: full(t) for name, t in live if not t.is_meta}))
    return found


@pytest.mark.parametrize("kinds", [("tied", "conv"), pytest.param(("mlp", "idle"), marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("label", "size"),
    [
        pytest.param(label, size, marks=[pytest.mark.slow] if size > way.sizes[0] else [])
        for label, way in WAYS.items()
        for size in way.sizes
    ],
)
def test_whole_weights_from_every_strategy(ranks, tmp_path, label, size, kinds):
    several = ranks(export, label, kinds, str(tmp_path), processes=size)
    sharded = WAYS[label].strategy in ("fsdp", "hsdp", "tensor_parallel", "pipeline")
    for i, kind in enumerate(kinds):
        written, names = read(tmp_path / kind), set(make(kind).state_dict())
        assert set(written) == names - {"head.weight"}
        for rank, found in enumerate(several):
            state, live = found[i]
            for name, tensor in live.items():
                if label != "local_sgd" or name in dict(make(kind).named_parameters()):
                    assert torch.equal(written[name], tensor), name
            assert set(state) == (names if rank == 0 or not sharded else set())
        for name, tensor in several[0][i][0].items():
            assert torch.equal(tensor, written["embed.weight" if name == "head.weight" else name]), name


def between_averagings(folder: str) -> State:
    with under("local_sgd", {"every": 10}, timeout=30) as acc:
        given = make("mlp")
        model, optimizer = acc.prepare(given, torch.optim.SGD(given.parameters(), lr=0.5))
        acc.backward(model(torch.full((4, 12), float(acc.process_index))).square().mean())
        optimizer.step()
        mine = {name: p.detach().clone() for name, p in model.named_parameters()}
        acc.save_model(model, folder)
    return mine


def test_ranks_that_train_alone_are_averaged_first(ranks, tmp_path):
    one, other = ranks(between_averagings, str(tmp_path))
    assert not equal(one, other)
    for name, tensor in read(tmp_path).items():
        torch.testing.assert_close(tensor, (one[name] + other[name]) / 2)


def some_ranks_save(folder: str) -> None:
    with under("ddp", timeout=30) as acc:
        model = acc.prepare(make("tied"))
        if acc.is_main_process:
            acc.save_model(model, f"{folder}/one")
            acc.get_state_dict(model)
    with under("fsdp", timeout=30) as acc:
        model = acc.prepare(make("mlp"))
        if acc.is_main_process:
            with pytest.raises(CheckpointError, match=r"is spread over ranks: save get_state_dict"):
                acc.save(model.state_dict(), f"{folder}/x.safetensors")
        acc.save(acc.get_state_dict(model), f"{folder}/x.safetensors")
        with pytest.raises(CheckpointError, match=r"a file: pass a folder"):
            acc.save_model(model, f"{folder}/x.safetensors")
        acc.save_model(model, f"{folder}/folder")  # all ranks are still together


def test_whole_models_are_saved_by_the_main_process_alone_and_shards_by_all(ranks, tmp_path):
    ranks(some_ranks_save, str(tmp_path))
    assert read(tmp_path / "one")
    assert equal(read(tmp_path / "folder"), easymp.load(tmp_path / "x.safetensors"))


def writes_of_ranks(folder: str) -> tuple[list[str], str]:
    """The shards that this rank writes, and the error on all ranks of a later save in which rank 1's disk is full."""
    written = []

    def noted(put):
        return lambda self, name, *args: (written.append(Path(name).name), put(self, name, *args))[1]

    def full_on_rank_1(put):
        def of(self, name, *args):
            if acc.process_index == 1 and "00002-of" in name:
                raise OSError(28, "No space left on device")
            return put(self, name, *args)

        return of

    with under("fsdp", timeout=30) as acc:
        model = acc.prepare(filled(1))
        with disk(put=noted):
            acc.save_model(model, folder, max_shard_size=SHARDED)
        model = acc.prepare(filled(2))
        with disk(put=full_on_rank_1), pytest.raises(CheckpointError) as caught:
            acc.save_model(model, folder, max_shard_size=SHARDED)
    return [name for name in written if "-of-" in name], str(caught.value)


def test_all_ranks_write_shards_and_hear_of_a_full_disk(ranks, tmp_path):
    one, other = ranks(writes_of_ranks, str(tmp_path))
    assert one[0] and other[0] and not {*one[0]} & {*other[0]}
    assert all("the model was not saved" in words and "No space left" in words for _, words in (one, other))
    assert float(read(tmp_path)["0.weight"].max()) == 1  # the earlier model


def slow_disk(folder: str) -> None:
    def slow(put):
        return lambda *args, **options: (time.sleep(3.0), put(*args, **options))[1]

    with under("fsdp", timeout=2) as acc, disk(put=slow):
        acc.save_model(acc.prepare(make("mlp")), folder, max_shard_size=SHARDED)


@pytest.mark.slow
def test_the_others_wait_for_a_disk_longer_than_a_collective_may_take(ranks, tmp_path):
    ranks(slow_disk, str(tmp_path))
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 and loaded(tmp_path)


# -- the layout --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 700, 4400, "3KB", 10**6])
@pytest.mark.parametrize("kind", ["mlp", "tied"])
def test_shards_are_cut_as_hugging_face_cuts(acc, tmp_path, kind, most):
    hub = pytest.importorskip("huggingface_hub")
    state = {name: t for name, t in make(kind).state_dict().items() if name != "head.weight"}
    pattern = "model{suffix}.safetensors"
    expected = hub.split_torch_state_dict_into_shards(state, filename_pattern=pattern, max_shard_size=most)
    acc.save_model(make(kind), tmp_path, max_shard_size=most)
    assert (tmp_path / INDEX).exists() == expected.is_sharded
    if expected.is_sharded:
        index = {"metadata": expected.metadata, "weight_map": expected.tensor_to_filename}
        assert json.loads((tmp_path / INDEX).read_text()) == index
    assert {p.name for p in tmp_path.glob("*.safetensors")} == set(expected.filename_to_tensors)
    for file, names in expected.filename_to_tensors.items():
        assert set(load_file(tmp_path / file)) == set(names)


def test_other_dtypes_come_back(acc, tmp_path):
    model, again = nn.Module(), nn.Module()
    for name in ("bfloat16", "float64", "complex64", "complex128", "float8_e4m3fn", "bool"):
        dtype = getattr(torch, name)
        model.register_buffer(
            f"a {name}", (torch.arange(6.0).view(2, 3).T - 1).to(dtype)
        )  # with other strides
        again.register_buffer(f"a {name}", torch.zeros(3, 2).to(dtype))
        for each in (model, again):
            each.register_buffer(f"empty {name}", torch.empty(0, 3, dtype=dtype))
    acc.save_model(model, tmp_path)
    load_weights(again, tmp_path)
    for (name, one), other in zip(model.named_buffers(), again.buffers()):
        assert torch.equal(*(t.flatten().contiguous().view(torch.uint8) for t in (one, other))), name


# -- in the place of another -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [SHARDED, ONE_FILE])
@pytest.mark.parametrize("after", [SHARDED, ONE_FILE])
def test_a_model_is_replaced(acc, tmp_path, before, after):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / ".model.safetensors.tmp").write_text("left by a save that was killed")
    url, memory = f"memory://{tmp_path.name}", pytest.importorskip("fsspec").filesystem("memory")
    for most in (before, after, after):
        for place in (tmp_path, url):
            acc.save_model(filled(most), place, max_shard_size=most)
            assert equal(loaded(place), filled(most).state_dict())
    memory.rm(f"/{tmp_path.name}", recursive=True)
    used = {"model.safetensors"}
    if after == SHARDED:
        used = {INDEX, *json.loads((tmp_path / INDEX).read_text())["weight_map"].values()}
    assert {p.name for p in tmp_path.iterdir()} == used | {"config.json"}


class Stop(BaseException):
    """The process is gone."""


@pytest.mark.parametrize("before", [SHARDED, ONE_FILE])
@pytest.mark.parametrize("after", [SHARDED, ONE_FILE])
def test_killed_at_any_operation_one_whole_model_is_there(acc, tmp_path, before, after):
    old, new = filled(1), filled(2)

    def save(folder: Path, steps: int) -> bool:
        """Whether `new` is saved over `old` within so many operations."""
        left = [steps]

        def guarded(real: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    raise Stop
                return real(*args, **kwargs)

            return call

        acc.save_model(old, folder, max_shard_size=before)
        with disk(**dict.fromkeys(("put", "supplant", "replace", "remove", "sync"), guarded)):
            try:
                acc.save_model(new, folder, max_shard_size=after)
            except Stop:
                return False
        return True

    for steps in range(100):
        done = save(tmp_path / str(steps), steps)
        there = loaded(tmp_path / str(steps))
        assert equal(there, new.state_dict()) or (equal(there, old.state_dict()) and not done), steps
        if done:
            break
    assert done and steps > 3


def test_a_full_disk_leaves_the_earlier_model(acc, tmp_path):
    def full_disk(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    acc.save_model(filled(1), tmp_path)
    with (
        disk(put=lambda _: full_disk),
        pytest.raises(CheckpointError, match=r"was not saved .*No space left"),
    ):
        acc.save_model(make("conv"), tmp_path)
    assert equal(loaded(tmp_path), filled(1).state_dict())


# -- one object in one file --------------------------------------------------------------------------------------------

TREES: list[Any] = [
    {"a": torch.arange(3), "b": {"c": [1, 2.5, None, True, "x"], "d": (b"\0", float("inf"))}},
    [torch.ones(2, 2, dtype=torch.bfloat16), {1: "one", (2, 3): torch.tensor(4)}],
    torch.arange(6.0).view(2, 3).T,
    {},
    "words",
]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def test_objects_come_back(acc, tmp_path):
    for place in (tmp_path / "x.safetensors", "memory://objects/x.safetensors"):
        for tree in TREES:  # each takes the place of the one before
            acc.save(tree, place)
            assert same(easymp.load(place), tree)
    pytest.importorskip("fsspec").filesystem("memory").rm("/objects", recursive=True)
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]
    load_file(tmp_path / "x.safetensors")


def test_plain_data_is_plain_json_and_tied_weights_are_written_once(acc, tmp_path):
    data, file = {"epoch": 3, "best": [0.5]}, tmp_path / "x.json"
    acc.save(data, file)
    assert json.loads(file.read_text()) == data == easymp.load(file)
    acc.save(make("tied").state_dict(), tmp_path / "x.safetensors")
    assert "head.weight" not in load_file(tmp_path / "x.safetensors")
    back = easymp.load(tmp_path / "x.safetensors")
    assert set(back) == set(make("tied").state_dict()) and back["head.weight"] is back["embed.weight"]


# -- refusals ----------------------------------------------------------------------------------------------------------


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"amax": 3}


ONE = {"a": torch.ones(1), "b": 1}


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda a, at: a.save_model(make("mlp"), at, safe_serialization=False), RefusedError, "safe_serialization=F"),
        (lambda a, at: a.save_model(make("mlp"), at, max_shard_size="much"), SettingError, "max_shard_size='much'"),
        (lambda a, at: a.save_model(nn.Linear(2, 2, device="meta"), at), CheckpointError, "weight is on the meta device"),
        (lambda a, at: a.save_model(Extra(2, 2), at), CheckpointError, "'_extra_state' in the state_dict of this Extra is a dict"),
        (lambda a, at: a.save(ONE, at / "x.json"), CheckpointError, "object/a is a tensor, which JSON has no form for"),
        (lambda a, at: a.save({"a": [1, lambda: 2]}, at / "x.safetensors"), CheckpointError, r"object/a/1: "),
        (lambda a, at: a.save(ONE, at / "x.pt"), RefusedError, r"call it .*x.safetensors"),
        (lambda a, at: a.save(ONE, at / "x.safetensors", safe_serialization=False), RefusedError, "safe_serialization=F"),
        (lambda a, at: a.save(ONE, at / "no" / "folder" / "x.safetensors"), CheckpointError, "cannot be written"),
        (lambda a, at: easymp.load(at / "x.safetensors"), CheckpointError, "no such file"),
    ],
)  # fmt: skip
def test_what_is_refused(acc, tmp_path, call, error, words):
    with pytest.raises(error, match=words):
        call(acc, tmp_path)
    assert not list(tmp_path.glob("[!.]*"))


def test_a_checkpoint_of_a_run_is_not_overwritten(acc, tmp_path):
    model = acc.prepare(make("mlp"))
    acc.save_state(tmp_path / "step")
    with pytest.raises(CheckpointError, match="is a checkpoint of save_state"):
        acc.save_model(model, tmp_path / "step")
    assert acc.get_state_dict(Extra(2, 2))["_extra_state"] == {"amax": 3}
