"""save_model, get_state_dict, save and load.

The files that Hugging Face's tools read, from every strategy, and never half of a model.
"""

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
from easymp.checkpoint.storage import LocalStorage
from easymp.compat.accelerate import Accelerator

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


def equal(one: State, second: State) -> bool:
    return one.keys() == second.keys() and all(torch.equal(t, second[name]) for name, t in one.items())


def loaded(path: Any) -> State:
    """The weights that the "mlp" takes from there."""
    model = filled(0)
    load_weights(model, path)
    return model.state_dict()


@contextmanager
def disk(**operations: Any):
    """Local files whose operations are these, made of the real ones."""
    with pytest.MonkeyPatch.context() as patch:
        for name, wrap in operations.items():
            patch.setattr(LocalStorage, name, wrap(getattr(LocalStorage, name)))
        yield


# -- every strategy ----------------------------------------------------------------------------------------------------


def export(label: str, models: tuple[str, ...], folder: str) -> list[tuple[State, State, State]]:
    """Of each kind of model, after a step: the state dict, the stream and the live tensors. save_model writes it."""
    setup = WAYS[label]
    results = []
    for kind in models:
        with under(setup.strategy, {**setup.options, **setup.more.get(kind, {})}, timeout=30) as acc:
            plain = make(kind)
            model, optimizer = acc.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.05))
            spread = acc._prepared.strategy
            x = torch.randn(BATCH, 12, generator=torch.Generator().manual_seed(1))
            train_step(acc, model, mean_square, x.chunk(spread.data_size)[spread.data_rank])
            optimizer.step()
            acc.save_model(model, Path(folder, kind), max_shard_size=SHARDED)
            state = {name: t.clone() for name, t in Accelerator.get_state_dict(acc, model).items()}
            streamed = {name: t.clone() for name, t in acc.weights(model, bucket=3000)}
            live = [*model.named_parameters(), *(model.named_buffers() if acc.is_main_process else ())]
            results.append((state, streamed, {name: full(t) for name, t in live if not t.is_meta}))
    return results


@pytest.mark.parametrize("models", [("tied", "conv"), pytest.param(("mlp", "idle"), marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("label", "size"),
    [
        pytest.param(label, size, marks=[pytest.mark.slow] if size > way.sizes[0] else [])
        for label, way in WAYS.items()
        for size in way.sizes
    ],
)
def test_whole_weights_from_every_strategy(ranks, tmp_path, label, size, models):
    by_rank = ranks(export, label, models, str(tmp_path), processes=size)
    sharded = WAYS[label].strategy in ("fsdp", "hsdp", "tensor_parallel", "pipeline")
    for i, kind in enumerate(models):
        file_tensors, names = read(tmp_path / kind), set(make(kind).state_dict())
        assert set(file_tensors) == names - {"head.weight"}
        for rank, results in enumerate(by_rank):
            state, streamed, live = results[i]
            for name, tensor in live.items():
                if label != "local_sgd" or name in dict(make(kind).named_parameters()):
                    assert torch.equal(file_tensors[name], tensor), name
            assert set(state) == (names if rank == 0 or not sharded else set()) and set(streamed) == names
            for name, tensor in [*streamed.items(), *(state.items() if rank == 0 else ())]:
                if rank == 0 or sharded:
                    assert torch.equal(tensor, file_tensors["embed.weight" if name == "head.weight" else name]), name


def between_averagings(folder: str) -> tuple[State, State]:
    with under("local_sgd", {"every": 10}, timeout=30) as acc:
        plain = make("mlp")
        model, optimizer = acc.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.5))
        acc.backward(model(torch.full((4, 12), float(acc.process_index))).square().mean())
        optimizer.step()
        own_weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        streamed = {name: t.clone() for name, t in acc.weights(model)}
        acc.save_model(model, folder)
    return own_weights, streamed


def test_ranks_that_train_alone_are_averaged_first(ranks, tmp_path):
    (first, streamed), (second, _) = ranks(between_averagings, str(tmp_path))
    assert not equal(first, second) and equal(streamed, read(tmp_path))
    for name, tensor in streamed.items():
        torch.testing.assert_close(tensor, (first[name] + second[name]) / 2)


def some_ranks_save(folder: str) -> None:
    with under("ddp", timeout=30) as acc:
        model = acc.prepare(make("tied"))
        if acc.is_main_process:
            acc.save_model(model, f"{folder}/one")
            Accelerator.get_state_dict(acc, model)
    with under("fsdp", timeout=30) as acc:
        model = acc.prepare(make("mlp"))
        if acc.is_main_process:
            with pytest.raises(CheckpointError, match=r"is spread over ranks: save dict"):
                acc.save(model.state_dict(), f"{folder}/x.safetensors")
        acc.save(Accelerator.get_state_dict(acc, model), f"{folder}/x.safetensors")
        with pytest.raises(CheckpointError, match=r"a file: pass a folder"):
            acc.save_model(model, f"{folder}/x.safetensors")
        acc.save_model(model, f"{folder}/folder")  # all ranks are still together


def test_whole_models_are_saved_by_the_main_process_alone_and_shards_by_all(ranks, tmp_path):
    ranks(some_ranks_save, str(tmp_path))
    assert read(tmp_path / "one")
    assert equal(read(tmp_path / "folder"), easymp.load(tmp_path / "x.safetensors"))


def save_to_full_disk(folder: str) -> str:
    def full(put):
        def of(self, name, *args):
            if "00002-of" in name:
                raise OSError(28, "No space left on device")
            return put(self, name, *args)

        return of

    with under("fsdp", timeout=30) as acc:
        acc.save_model(acc.prepare(filled(1)), folder, max_shard_size=SHARDED)
        model = acc.prepare(filled(2))
        with disk(put=full), pytest.raises(CheckpointError) as caught:
            acc.save_model(model, folder, max_shard_size=SHARDED)
    return str(caught.value)


def test_all_ranks_hear_of_a_full_disk(ranks, tmp_path):
    for message in ranks(save_to_full_disk, str(tmp_path)):
        assert "the model was not saved" in message and "No space left" in message
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


@pytest.mark.parametrize("max_shard_size", [1, 700, 4400, "3KB", 10**6])
@pytest.mark.parametrize("kind", ["mlp", "tied"])
def test_shards_are_cut_as_hugging_face_cuts(acc, tmp_path, kind, max_shard_size):
    hub = pytest.importorskip("huggingface_hub")
    state = {name: t for name, t in make(kind).state_dict().items() if name != "head.weight"}
    pattern = "model{suffix}.safetensors"
    expected = hub.split_torch_state_dict_into_shards(state, filename_pattern=pattern, max_shard_size=max_shard_size)
    acc.save_model(make(kind), tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / INDEX).exists() == expected.is_sharded
    if expected.is_sharded:
        index = {"metadata": expected.metadata, "weight_map": expected.tensor_to_filename}
        assert json.loads((tmp_path / INDEX).read_text()) == index
    assert {p.name for p in tmp_path.glob("*.safetensors")} == set(expected.filename_to_tensors)
    for file, names in expected.filename_to_tensors.items():
        assert set(load_file(tmp_path / file)) == set(names)


def test_other_dtypes_come_back(acc, tmp_path):
    model, reloaded = nn.Module(), nn.Module()
    for name in ("bfloat16", "float64", "complex64", "complex128", "float8_e4m3fn", "bool"):
        dtype = getattr(torch, name)
        model.register_buffer(f"a {name}", (torch.arange(6.0).view(2, 3).T - 1).to(dtype))  # with other strides
        reloaded.register_buffer(f"a {name}", torch.zeros(3, 2).to(dtype))
        for module in (model, reloaded):
            module.register_buffer(f"empty {name}", torch.empty(0, 3, dtype=dtype))
    acc.save_model(model, tmp_path)
    load_weights(reloaded, tmp_path)
    for (name, one), loaded_tensor in zip(model.named_buffers(), reloaded.buffers()):
        assert torch.equal(*(t.flatten().contiguous().view(torch.uint8) for t in (one, loaded_tensor))), name


# -- in the place of another -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [SHARDED, ONE_FILE])
@pytest.mark.parametrize("after", [SHARDED, ONE_FILE])
def test_a_model_is_replaced(acc, tmp_path, before, after):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / ".model.safetensors.tmp").write_text("left by a save that was killed")
    url, memory = f"memory://{tmp_path.name}", pytest.importorskip("fsspec").filesystem("memory")
    for max_shard_size in (before, after, after):
        for path in (tmp_path, url):
            acc.save_model(filled(max_shard_size), path, max_shard_size=max_shard_size)
            assert equal(loaded(path), filled(max_shard_size).state_dict())
    memory.rm(f"/{tmp_path.name}", recursive=True)
    expected_files = {"model.safetensors"}
    if after == SHARDED:
        expected_files = {INDEX, *json.loads((tmp_path / INDEX).read_text())["weight_map"].values()}
    assert {p.name for p in tmp_path.iterdir()} == expected_files | {"config.json"}


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
        with disk(**dict.fromkeys(("put", "replace", "remove", "sync"), guarded)):
            try:
                acc.save_model(new, folder, max_shard_size=after)
            except Stop:
                return False
        return True

    for steps in range(100):
        is_saved = save(tmp_path / str(steps), steps)
        weights = loaded(tmp_path / str(steps))
        assert equal(weights, new.state_dict()) or (equal(weights, old.state_dict()) and not is_saved), steps
        if is_saved:
            break
    assert is_saved and steps > 3


# -- one object in one file --------------------------------------------------------------------------------------------

TREES: list[Any] = [
    {"a": torch.arange(3), "b": {"c": [1, 2.5, None, True, "x"], "d": (b"\0", float("inf"))}},
    [torch.ones(2, 2, dtype=torch.bfloat16), {1: "one", (2, 3): torch.tensor(4)}],
    torch.arange(6.0).view(2, 3).T,
    {},
    "words",
]


def test_objects_come_back(acc, tmp_path):
    for path in (tmp_path / "x.safetensors", "memory://objects/x.safetensors"):
        for tree in TREES:  # each takes the place of the one before
            acc.save(tree, path)
            assert repr(easymp.load(path)) == repr(tree)
    pytest.importorskip("fsspec").filesystem("memory").rm("/objects", recursive=True)
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]
    load_file(tmp_path / "x.safetensors")


def test_plain_data_is_plain_json_and_tied_weights_are_written_once(acc, tmp_path):
    data, file = {"epoch": 3, "best": [0.5]}, tmp_path / "x.json"
    acc.save(data, file)
    assert json.loads(file.read_text()) == data == easymp.load(file)
    acc.save(make("tied").state_dict(), tmp_path / "x.safetensors")
    assert "head.weight" not in load_file(tmp_path / "x.safetensors")
    loaded_state = easymp.load(tmp_path / "x.safetensors")
    assert set(loaded_state) == set(make("tied").state_dict())
    assert loaded_state["head.weight"] is loaded_state["embed.weight"]


# -- refusals ----------------------------------------------------------------------------------------------------------


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"amax": 3}


ONE = {"a": torch.ones(1), "b": 1}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda a, at: a.save_model(make("mlp"), at, safe_serialization=False), RefusedError, "safe_serialization=F"),
        (lambda a, at: a.save_model(make("mlp"), at, max_shard_size="much"), SettingError, "max_shard_size='much'"),
        (lambda a, at: a.save_model(nn.Linear(2, 2, device="meta"), at), CheckpointError, "is on the meta device"),
        (lambda a, at: a.save_model(Extra(2, 2), at), CheckpointError,
         "'_extra_state' in the .* of this Extra is a dict"),
        (lambda a, at: a.save(ONE, at / "x.json"), CheckpointError, "object/a is a tensor, which JSON has no form for"),
        (lambda a, at: a.save({"a": [1, lambda: 2]}, at / "x.safetensors"), CheckpointError, r"object/a/1: "),
        (lambda a, at: a.save(ONE, at / "x.pt"), RefusedError, r"call it .*x.safetensors"),
        (lambda a, at: a.save(ONE, at / "x", safe_serialization=False), RefusedError, "safe_serialization=F"),
        (lambda a, at: a.save(ONE, at / "no" / "folder" / "x.safetensors"), CheckpointError, "cannot be written"),
        (lambda a, at: easymp.load(at / "x.safetensors"), CheckpointError, "no such file"),
    ],
)  # fmt: skip
def test_what_is_refused(acc, tmp_path, call, error, message):
    with pytest.raises(error, match=message):
        call(acc, tmp_path)
    assert not list(tmp_path.glob("[!.]*"))


def test_a_checkpoint_of_a_run_is_not_overwritten(acc, tmp_path):
    model = acc.prepare(make("mlp"))
    acc.save_state(tmp_path / "step")
    with pytest.raises(CheckpointError, match="is a checkpoint of save_state"):
        acc.save_model(model, tmp_path / "step")
    assert Accelerator.get_state_dict(acc, Extra(2, 2))["_extra_state"] == {"amax": 3}
