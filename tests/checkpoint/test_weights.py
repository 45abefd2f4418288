"""load_weights: what other tools wrote goes into any model, under any strategy, each rank reading what it holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from easymp import Accelerator, CheckpointError, SettingError, load_weights
from easymp.checkpoint.layout import place_of
from easymp.checkpoint.storage_local import LocalStorage
from easymp.checkpoint.weights import Skipped

from ..strategies.models import BATCH, MODELS, Tied, make, mean_square, train_step
from ..strategies.ways import WAYS

State = dict[str, Tensor]


def values(kind: str) -> State:
    """Other values than `make` gives, under the names of the model; of tied names, the first."""
    torch.manual_seed(11)
    state = {name: t.clone() for name, t in MODELS[kind]().state_dict().items()}
    if kind == "tied":
        del state["head.weight"]
    return {name: torch.rand_like(t) if t.is_floating_point() else t + 5 for name, t in state.items()}


def in_one_file(folder: Path, state: State) -> Path:
    save_file(state, folder / "any.safetensors", {"format": "pt"})
    return folder / "any.safetensors"


def in_a_folder(folder: Path, state: State) -> Path:
    save_file(state, folder / "model.safetensors")
    return folder


def in_shards(folder: Path, state: State) -> Path:
    names = list(state)
    table = {name: f"model-{i % 3 + 1:05d}-of-00003.safetensors" for i, name in enumerate(names)}
    for file in set(table.values()):
        save_file({name: state[name] for name in names if table[name] == file}, folder / file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in state.values())}, "weight_map": table}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def in_a_cache(folder: Path, state: State) -> Path:
    """As the hub's downloads lie: links to files elsewhere."""
    (folder / "blobs").mkdir()
    (folder / "snapshot").mkdir()
    in_shards(folder / "blobs", state)
    for number, file in enumerate(sorted((folder / "blobs").iterdir())):
        blob = file.rename(file.with_name(f"blob{number}"))
        (folder / "snapshot" / file.name).symlink_to(Path("..", "blobs", blob.name))
    return folder / "snapshot"


LAYOUTS = {
    "one file": in_one_file,
    "a folder": in_a_folder,
    "shards": in_shards,
    "an index": lambda folder, state: in_shards(folder, state) / "model.safetensors.index.json",
    "a cache": in_a_cache,
}


def check(model: nn.Module, state: State) -> None:
    live = model.state_dict()
    assert set(live) - set(state) <= {"head.weight"}
    for name, tensor in state.items():
        torch.testing.assert_close(live[name], tensor, rtol=0, atol=0)


# -- from where --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_from_what_other_tools_write(tmp_path: Path, layout: str, kind: str) -> None:
    place = LAYOUTS[layout](tmp_path, values(kind))
    model = make(kind)
    before = {name: id(t) for name, t in model.named_parameters()}
    assert not load_weights(model, place)
    check(model, values(kind))
    assert {name: id(t) for name, t in model.named_parameters()} == before
    if isinstance(model, Tied):
        assert model.head.weight is model.embed.weight


def save_and_load(label: str, kind: str, folder: str) -> list[str]:
    """Train a step, save, load what was saved into a plain model on each rank: which names differ from what was live."""
    from ..strategies.models import whole

    way = WAYS[label]
    options = {**way.options, **way.more.get(kind, {})}
    with Accelerator(
        mixed_precision="no", strategy=way.strategy, strategy_options=options, timeout=30
    ) as acc:
        given = make(kind)
        model, optimizer = acc.prepare(given, torch.optim.SGD(given.parameters(), lr=0.05))
        spread = acc._prepared.strategy
        x = torch.randn(BATCH, 12, generator=torch.Generator().manual_seed(1)).chunk(spread.data_size)[
            spread.data_rank
        ]
        train_step(acc, model, mean_square, x)
        optimizer.step()
        acc.save_state(folder)
        plain = make(kind)
        load_weights(plain, folder)
        there = {name: whole(p) for name, p in model.named_parameters() if not p.is_meta}
    return [name for name, p in plain.named_parameters() if name in there and not torch.equal(p, there[name])]


@pytest.mark.parametrize(
    ("label", "kind"),
    [("single", "conv"), ("fsdp", "tied"), ("tensor_parallel in fsdp", "mlp"), ("pipeline", "tied")],
)
def test_from_our_own_checkpoints(ranks: Any, tmp_path: Path, label: str, kind: str) -> None:
    found = ranks(save_and_load, label, kind, str(tmp_path / "step"), processes=WAYS[label].sizes[-1])
    assert found == [[]] * len(found)


def test_one_of_several_models(tmp_path: Path) -> None:
    with Accelerator(mixed_precision="no", cpu=True) as acc:
        acc.prepare(make("mlp"), make("conv"))
        acc.save_state(tmp_path / "step")
    model = MODELS["conv"]()
    load_weights(model, tmp_path / "step", which="model_1")
    check(model, make("conv").state_dict())
    with pytest.raises(
        CheckpointError, match=r"no weights of 'modell_1', did you mean 'model_1'\? It has: model, model_1"
    ):
        load_weights(model, tmp_path / "step", which="modell_1")


def test_from_a_url(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.put(f"{in_shards(tmp_path, values('conv'))}/", "/weights/", recursive=True)
    try:
        for place in (
            "memory://weights",
            "memory://weights/model.safetensors.index.json",
            f"file://{tmp_path}",
        ):
            model = make("conv")
            load_weights(model, place)
            check(model, values("conv"))
        with pytest.raises(CheckpointError, match=r"memory://nothing: .*empty or missing"):
            load_weights(make("conv"), "memory://nothing")
    finally:
        memory.rm("/weights", recursive=True)


def test_a_changed_byte_in_our_own_checkpoint_is_noticed(tmp_path: Path) -> None:
    with Accelerator(mixed_precision="no", cpu=True) as acc:
        acc.prepare(make("mlp"))
        acc.save_state(tmp_path / "step")
    (file,) = (tmp_path / "step").glob("model-*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"reading failed when the model was partly loaded; load it again .*block 0"
    ):
        load_weights(make("mlp"), tmp_path / "step")


# -- into what ---------------------------------------------------------------------------------------------------------


def loaded(label: str, place: dict[str, str], when: str) -> list[tuple[str, int, int]]:
    """Load into a prepared model of each kind; what is wrong, the bytes that were read, and those that this rank holds."""
    way = WAYS[label]
    found = []
    for kind, path in place.items():
        options = {**way.options, **way.more.get(kind, {})}
        with Accelerator(
            mixed_precision="no", strategy=way.strategy, strategy_options=options, timeout=30
        ) as acc:
            model = make(kind)
            if when == "before":
                load_weights(model, path)
            model = acc.prepare(model)
            if when == "in use":  # a pipeline is cut by its first call
                spread = acc._prepared.strategy
                with torch.no_grad():
                    model(torch.randn(BATCH, 12).chunk(spread.data_size)[spread.data_rank])
            read = 0
            if when != "before":
                with counting() as count:
                    load_weights(model, path)
                read = count()
            expected, held, wrong = values(kind), 0, []
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                there = place_of(tensor)
                for box, part in there.parts if there else ():
                    held += part.nbytes
                    if not torch.equal(part, expected[name][tuple(slice(o, o + n) for o, n in zip(*box))]):
                        wrong.append(f"{kind}: {name}{box}")
            found.append(("; ".join(wrong), read, held))
    return found


class counting:
    """Inside, calling it says how many bytes were fetched."""

    def __enter__(self) -> Callable[[], int]:
        self.bytes, self.before = 0, LocalStorage.fetch

        def fetch(storage: Any, name: str, size: int, checksums: Any, wanted: Any, *rest: Any) -> None:
            self.bytes += sum(len(view) for _, view in wanted)
            self.before(storage, name, size, checksums, wanted, *rest)

        LocalStorage.fetch = fetch  # type: ignore[method-assign, assignment]
        return lambda: self.bytes

    def __exit__(self, *_: object) -> None:
        LocalStorage.fetch = self.before  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {kind: str(in_shards(tmp_path_factory.mktemp(kind), values(kind))) for kind in MODELS}


@pytest.mark.parametrize(
    ("label", "size"), [(label, size) for label, way in WAYS.items() for size in way.sizes]
)
def test_each_rank_reads_what_it_holds(ranks: Any, files: dict[str, str], label: str, size: int) -> None:
    for rank in ranks(loaded, label, files, "in use", processes=size):
        for wrong, read, held in rank:
            assert not wrong
            assert read == held


@pytest.mark.parametrize("label", ["ddp", "fsdp", "tensor_parallel", "pipeline"])
def test_before_prepare(ranks: Any, files: dict[str, str], label: str) -> None:
    assert all(not wrong for rank in ranks(loaded, label, files, "before") for wrong, *_ in rank)


@pytest.mark.parametrize("wrapped", ["compiled", "parallel", "blocks compiled"])
def test_wrappers_do_not_matter(tmp_path: Path, wrapped: str) -> None:
    model: Any = make("tied")
    if wrapped == "blocks compiled":
        model.blocks[0] = torch.compile(model.blocks[0])
    else:
        model = torch.compile(model) if wrapped == "compiled" else nn.DataParallel(model)
    prefixes = {"compiled": "_orig_mod.", "parallel": "module."}
    load_weights(model, in_one_file(tmp_path, values("tied")))
    inner = {
        name.removeprefix(prefixes.get(wrapped, "")).replace("_orig_mod.", ""): t
        for name, t in model.state_dict().items()
    }
    assert all(torch.equal(inner[name], t) for name, t in values("tied").items())


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_names_of_wrappers_in_the_files(
    tmp_path: Path, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make("mlp")
    with caplog.at_level("INFO", "easymp"):
        load_weights(model, in_one_file(tmp_path, {prefix + name: t for name, t in values("mlp").items()}))
    check(model, values("mlp"))
    assert f"'{prefix}0.bias' is '0.bias'" in caplog.text


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_tied_weights_by_any_of_their_names(tmp_path: Path, name: str) -> None:
    state = values("tied")
    state[name] = state.pop("embed.weight")
    model: Any = make("tied")
    load_weights(model, in_one_file(tmp_path, state))
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, state[name])


def test_both_names_of_a_tied_weight_must_agree(tmp_path: Path) -> None:
    state = values("tied")
    model: Any = make("tied")
    load_weights(model, in_one_file(tmp_path, {**state, "head.weight": state["embed.weight"].clone()}))
    with pytest.raises(
        CheckpointError, match=r"embed.weight and head.weight are one tensor in the model, and differ"
    ):
        load_weights(model, in_one_file(tmp_path, {**state, "head.weight": state["embed.weight"] + 1}))
    check(model, state)


@pytest.mark.parametrize("names", [("first",), ("first", "second")])
def test_tied_complex_weights(tmp_path: Path, names: tuple[str, ...]) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.second = nn.Parameter(torch.randn(3, dtype=torch.complex128))

    saved, live = Tied(), Tied()
    Accelerator().save_model(saved, tmp_path)
    if len(names) == 2:
        parts = torch.view_as_real(saved.first.detach())
        save_file({name: parts.clone() for name in names}, tmp_path / "model.safetensors")
    assert not load_weights(live, tmp_path)
    assert live.first is live.second
    assert torch.equal(live.first, saved.first)


def test_an_untied_model_takes_what_the_file_says_of_other_names(tmp_path: Path) -> None:
    model: Any = make("tied")
    model.head.weight = nn.Parameter(torch.zeros_like(model.embed.weight))
    save_file(values("tied"), tmp_path / "model.safetensors", {"format": "pt", "head.weight": "embed.weight"})
    load_weights(model, tmp_path)
    assert torch.equal(model.head.weight, values("tied")["embed.weight"])


# -- dtypes ------------------------------------------------------------------------------------------------------------


def test_another_dtype_is_an_error_that_names_both(tmp_path: Path) -> None:
    model = make("mlp")
    before = {name: t.clone() for name, t in model.state_dict().items()}
    place = in_one_file(tmp_path, {name: t.bfloat16() for name, t in values("mlp").items()})
    with pytest.raises(
        CheckpointError,
        match=r"0.weight: torch.bfloat16 in the files, and torch.float32 in the model: pass dtype='live'",
    ):
        load_weights(model, place)
    check(model, before)
    load_weights(model, place, dtype="live")
    check(model, {name: t.bfloat16().float() for name, t in values("mlp").items()})


def half_way(path: str, strategy: str) -> list[bool]:
    """Load low-precision weights with fp32 masters, and take a step with a rate of zero."""
    with Accelerator(mixed_precision="O2", strategy=strategy, timeout=30) as acc:
        given = make("mlp")
        model, optimizer = acc.prepare(given, torch.optim.SGD(given.parameters(), lr=0.0))
        load_weights(model, path, dtype="live")
        acc.backward(model(torch.randn(4, 12)).float().square().mean())
        optimizer.step()
        expected = {name: t.to(p.dtype) for (name, t), p in zip(values("mlp").items(), model.parameters())}
        parts = [(name, place) for name, p in model.named_parameters() if (place := place_of(p))]
        return [
            torch.equal(part, expected[name][tuple(slice(o, o + n) for o, n in zip(*box))])
            for name, place in parts
            for box, part in place.parts
        ]


@pytest.mark.parametrize(("strategy", "size"), [("single", 1), ("fsdp", 2)])
def test_fp32_masters_follow(ranks: Any, files: dict[str, str], strategy: str, size: int) -> None:
    assert all(all(same) for same in ranks(half_way, files["mlp"], strategy, processes=size))


# -- what does not fit -------------------------------------------------------------------------------------------------


def test_names_that_do_not_fit_are_listed_with_the_nearest(tmp_path: Path) -> None:
    state = values("mlp")
    state["2.wieght"] = state.pop("2.weight")
    model = make("mlp")
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, in_one_file(tmp_path, state))
    for words in (
        "missing: 2.weight",
        "unexpected: 2.wieght",
        "did you mean '2.wieght'?",
        "strict=False",
        "this Sequential",
    ):
        assert words in str(caught.value)
    check(model, before)


def test_not_strict_says_what_was_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {**values("mlp"), "new": torch.ones(1), "4.bias": torch.ones(7)}
    del state["0.bias"]
    model = make("mlp")
    with pytest.raises(CheckpointError, match=r"4.bias \(\[7\] in the files, \[5\] in the model\)"):
        load_weights(model, in_one_file(tmp_path, state))
    skipped = load_weights(model, in_one_file(tmp_path, state), strict=False)
    assert skipped == Skipped(("0.bias",), ("new",), ("4.bias ([7] in the files, [5] in the model)",))
    assert "skipped: missing: 0.bias; unexpected: new; of another shape: 4.bias" in caplog.text
    live = model.state_dict()
    assert torch.equal(live["0.weight"], state["0.weight"]) and torch.equal(
        live["0.bias"], make("mlp").state_dict()["0.bias"]
    )


NOTHING_THERE = {
    "nothing": ({}, r"it is empty or missing"),
    "pickles": ({"pytorch_model.bin": b"x"}, r"checkpoint.read_accelerate"),
    "checkpoints": ({"step-00000010/COMMIT": b"x"}, r"pass that of one of them, such as step-00000010"),
    "another file": ({"adapter.safetensors": b"x"}, r"pass a file, such as adapter.safetensors"),
    "no header": ({"model.safetensors": b"x" * 64}, r"model.safetensors: "),
    "no JSON": ({"model.safetensors.index.json": b"{"}, r"JSON"),
    "no index": ({"model.safetensors.index.json": b"[]"}, r"no weight_map"),
    "a path out of the folder": (
        {"model.safetensors.index.json": b'{"weight_map": {"a": "../x.safetensors"}}'},
        r"'../x.safetensors', which is not a file beside the index",
    ),
    "a missing shard": (
        {"model.safetensors.index.json": b'{"weight_map": {"a": "x.safetensors"}}'},
        r"x.safetensors: there is no such",
    ),
}


@pytest.mark.parametrize("case", NOTHING_THERE)
def test_a_place_without_weights_says_what_is_there(tmp_path: Path, case: str) -> None:
    content, pattern = NOTHING_THERE[case]
    for name, text in content.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text)
    with pytest.raises(CheckpointError, match=pattern):
        load_weights(make("mlp"), tmp_path)


def test_an_index_that_names_what_a_shard_lacks(tmp_path: Path) -> None:
    in_shards(tmp_path, values("mlp"))
    index = tmp_path / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"]["5.weight"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(table))
    with pytest.raises(
        CheckpointError,
        match=r"5.weight shall be in model-00001-of-00003.safetensors, which has no such tensor",
    ):
        load_weights(make("mlp"), tmp_path)


def test_what_is_no_parameter_or_buffer_is_refused(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"amax": 3}

        def set_extra_state(self, state: Any) -> None:
            pass

    with pytest.raises(
        CheckpointError, match=r"'_extra_state' in the state_dict of this Extra .* load_state_dict"
    ):
        load_weights(Extra(2, 2), in_one_file(tmp_path, {"weight": torch.ones(2, 2), "bias": torch.ones(2)}))


def test_arguments_of_another_kind(tmp_path: Path) -> None:
    place = in_one_file(tmp_path, values("mlp"))
    for dtype in ("float16", torch.int32, 3):
        with pytest.raises(SettingError, match="dtype="):
            load_weights(make("mlp"), place, dtype=dtype)  # type: ignore[arg-type]
    for device in ({"": 0}, "auto", 1.5):
        with pytest.raises(SettingError, match="device_map="):
            load_weights(make("mlp"), place, device_map=device)  # type: ignore[arg-type]


# -- the meta device ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_on_the_meta_device_gets_memory(tmp_path: Path, kind: str) -> None:
    with torch.device("meta"):
        model = MODELS[kind]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    load_weights(model, in_one_file(tmp_path, values(kind)), device_map="rank")
    check(model, values(kind))
    assert {id(p) for p in model.parameters()} == {id(p) for p in optimizer.param_groups[0]["params"]}
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in make(kind).parameters()]
    model(torch.randn(2, 12))


def test_a_meta_buffer_that_no_file_holds(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
        model.register_buffer("angles", torch.ones(2), persistent=False)
    with pytest.raises(CheckpointError, match=r"buffer 'angles' is on the meta device, and no file holds it"):
        load_weights(model, in_one_file(tmp_path, {"weight": torch.ones(2, 2), "bias": torch.ones(2)}))
    assert model.weight.is_meta


def built_on_meta(path: str) -> list[str]:
    """Sharded first, block by block, and then loaded: no rank ever holds the whole."""
    with Accelerator(mixed_precision="no", strategy="fsdp", timeout=30) as acc:
        with torch.device("meta"):
            model = nn.Sequential(
                nn.Linear(12, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 5)
            )
        model = acc.prepare(model)
        load_weights(model, path)
        expected = values("mlp")
        return [
            name
            for name, p in model.named_parameters()
            for box, part in place_of(p).parts  # type: ignore[union-attr]
            if not torch.equal(part, expected[name][tuple(slice(o, o + n) for o, n in zip(*box))])
        ]


def test_a_meta_model_that_is_sharded_and_then_loaded(ranks: Any, files: dict[str, str]) -> None:
    assert ranks(built_on_meta, files["mlp"]) == [[], []]
