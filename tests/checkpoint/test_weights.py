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

from easymp import Accelerator, CheckpointError, SettingError, Settings, load_weights
from easymp.checkpoint.manifest import local_chunks
from easymp.checkpoint.storage import SourceFile
from easymp.checkpoint.weights import load_source, open_source

from ..strategies.models import BATCH, MODELS, Tied, make, mean_square, train_step, whole
from ..strategies.ways import WAYS
from .samples import flip

State = dict[str, Tensor]
INDEX = "model.safetensors.index.json"


def values(kind: str) -> State:
    """Other values than `make` gives, under the names of the model; of tied names, the first."""
    torch.manual_seed(11)
    state = {name: t.clone() for name, t in MODELS[kind]().state_dict().items()}
    state.pop("head.weight", None)
    return {name: torch.rand_like(t) if t.is_floating_point() else t + 5 for name, t in state.items()}


def in_one_file(folder: Path, state: State) -> Path:
    save_file(state, folder / "any.safetensors", {"format": "pt"})
    return folder / "any.safetensors"


def in_a_folder(folder: Path, state: State) -> Path:
    save_file(state, folder / "model.safetensors")
    return folder


def in_shards(folder: Path, state: State) -> Path:
    table = {name: f"model-{i % 3 + 1:05d}-of-00003.safetensors" for i, name in enumerate(state)}
    for file in set(table.values()):
        save_file({name: t for name, t in state.items() if table[name] == file}, folder / file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in state.values())}, "weight_map": table}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def in_a_cache(folder: Path, state: State) -> Path:
    """As the hub's downloads lie: links to files elsewhere."""
    (folder / "blobs").mkdir()
    (folder / "snapshot").mkdir()
    for number, file in enumerate(sorted(in_shards(folder / "blobs", state).iterdir())):
        blob = file.rename(file.with_name(f"blob{number}"))
        (folder / "snapshot" / file.name).symlink_to(Path("..", "blobs", blob.name))
    return folder / "snapshot"


def by_an_index(folder: Path, state: State) -> Path:
    return in_shards(folder, state) / INDEX


LAYOUTS = [in_one_file, in_a_folder, in_shards, by_an_index, in_a_cache]


def check(model: nn.Module, state: State) -> None:
    live = model.state_dict()
    assert set(live) - set(state) <= {"head.weight"}
    assert all(torch.equal(live[name], tensor) for name, tensor in state.items())


def refused(message: str, path: Any, model: nn.Module | None = None, **options: Any) -> None:
    """The weights do not load into `model`, the "mlp" by default, and leave it as it is."""
    model = model or make("mlp")
    before = {name: t.clone() for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    with pytest.raises((CheckpointError, SettingError), match=message):
        load_weights(model, path, **options)
    after = model.state_dict()
    assert all(t.is_meta or torch.equal(t, after[name]) for name, t in before.items())


@pytest.mark.parametrize("kind", MODELS)
def test_files_of_other_tools_load(tmp_path, kind):
    for layout in LAYOUTS:
        (tmp_path / layout.__name__).mkdir()
        model = make(kind)
        before = {name: id(t) for name, t in model.named_parameters()}
        assert not load_weights(model, layout(tmp_path / layout.__name__, values(kind)))
        check(model, values(kind))
        assert {name: id(t) for name, t in model.named_parameters()} == before
        assert not isinstance(model, Tied) or model.head.weight is model.embed.weight
    with torch.device("meta"):
        model = MODELS[kind]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    load_weights(model, in_one_file(tmp_path, values(kind)), device_map="rank")  # it gets memory
    check(model, values(kind))
    assert {id(p) for p in model.parameters()} == {id(p) for p in optimizer.param_groups[0]["params"]}
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in make(kind).parameters()]
    model(torch.randn(2, 12))


def accelerator_of(label: str, kind: str) -> Accelerator:
    setup = WAYS[label]
    options = {**setup.options, **setup.more.get(kind, {})}
    return Accelerator(
        mixed_precision="no", strategy=setup.strategy, strategy_options=options, settings=Settings(timeout=30)
    )


def saved_and_loaded(rows: list[tuple[str, str]], folder: Path) -> list[str]:
    """Train a step, save, load the checkpoint into a plain model on each rank.

    The names that differ from the live ones.
    """
    wrong = []
    for label, kind in rows:
        with accelerator_of(label, kind) as acc:
            module = make(kind)
            model, optimizer = acc.prepare(module, torch.optim.SGD(module.parameters(), lr=0.05))
            spread = acc._prepared.strategy
            x = torch.randn(BATCH, 12, generator=torch.Generator().manual_seed(1))
            train_step(acc, model, mean_square, x.chunk(spread.data_size)[spread.data_rank])
            optimizer.step()
            acc.save_state(folder / label)
            plain = make(kind)
            load_weights(plain, folder / label)
            live = {name: whole(p) for name, p in model.named_parameters() if not p.is_meta}
            wrong += [n for n, p in plain.named_parameters() if n in live and not torch.equal(p, live[n])]
    return wrong


def test_checkpoints_load(ranks, tmp_path):
    assert saved_and_loaded([("single", "conv")], tmp_path) == []
    rows = [("fsdp", "tied"), ("tensor_parallel in fsdp", "mlp"), ("pipeline", "tied")]
    assert ranks(saved_and_loaded, rows, tmp_path, processes=4) == [[]] * 4


def test_one_of_several_models_and_a_damaged_one(tmp_path):
    with Accelerator(mixed_precision="no", cpu=True) as acc:
        acc.prepare(make("mlp"), make("conv"))
        path = tmp_path / "step"
        acc.save_state(path)
    model = MODELS["conv"]()
    load_weights(model, path, which="model_1")
    check(model, make("conv").state_dict())
    message = r"no weights of 'modell_1', did you mean 'model_1'\? It has: model, model_1"
    refused(message, path, which="modell_1")
    flip(next(path.glob("model-*.safetensors")), -1)
    with pytest.raises(CheckpointError, match=r"partly loaded; load it again .*block 0"):
        load_weights(make("mlp"), path)


def test_urls_load(tmp_path):
    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.put(f"{in_shards(tmp_path, values('conv'))}/", "/weights/", recursive=True)
    try:
        for url in ("memory://weights", f"memory://weights/{INDEX}", f"file://{tmp_path}"):
            model = make("conv")
            load_weights(model, url)
            check(model, values("conv"))
        refused(r"memory://nothing: .*empty or missing", "memory://nothing")
    finally:
        memory.rm("/weights", recursive=True)


def holds(tensors: Any, expected: State) -> tuple[list[str], int]:
    """The chunks of these tensors that are not as expected on this rank, and the bytes of all chunks here."""
    parts = [(name, *part) for name, t in tensors for part in local_chunks([t])[0] or ()]
    wrong = [
        f"{name}{box}"
        for name, box, part in parts
        if not torch.equal(part, expected[name][tuple(slice(o, o + n) for o, n in zip(*box))].to(part.dtype))
    ]
    return wrong, sum(part.nbytes for _, _, part in parts)


class counting:
    """Inside, calling it says how many bytes were fetched."""

    def __enter__(self) -> Callable[[], int]:
        self.bytes, self.before = 0, SourceFile.fetch

        def fetch(file: SourceFile, targets: Any, *arguments: Any) -> None:
            self.bytes += sum(len(view) for _, view in targets)
            self.before(file, targets, *arguments)

        SourceFile.fetch = fetch  # type: ignore[method-assign, assignment]
        return lambda: self.bytes

    def __exit__(self, *_: object) -> None:
        SourceFile.fetch = self.before  # type: ignore[method-assign]


def loaded(labels: list[str], paths: dict[str, str], after_prepare: bool = True) -> list[str]:
    """Load into models of each kind, before they are prepared or in use: what is wrong, or read and not held."""
    faults = []
    for label in labels:
        for kind, path in paths.items():
            with accelerator_of(label, kind) as acc:
                model = make(kind)
                if not after_prepare:
                    load_weights(model, path)
                model = acc.prepare(model)
                with counting() as count:
                    if after_prepare:  # a pipeline is cut by its first call
                        spread = acc._prepared.strategy
                        with torch.no_grad():
                            model(torch.randn(BATCH, 12).chunk(spread.data_size)[spread.data_rank])
                        load_weights(model, path)
                wrong, held_bytes = holds([*model.named_parameters(), *model.named_buffers()], values(kind))
                faults += [f"{label}, {kind}: {chunk}" for chunk in wrong]
                if after_prepare and count() != held_bytes:
                    faults.append(f"{label}, {kind}: read {count()} bytes, holds {held_bytes}")
    return faults


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {kind: str(in_shards(tmp_path_factory.mktemp(kind), values(kind))) for kind in MODELS}


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_rank_reads_what_it_holds(ranks, files, size):
    labels = [label for label, way in WAYS.items() if way.sizes[-1] == size]
    assert ranks(loaded, labels, files, processes=size) == [[]] * size


def with_masters(strategy: str, path: str) -> list[str]:
    """Load low-precision weights with fp32 masters, and take a step with a rate of zero."""
    with Accelerator(mixed_precision="O2", strategy=strategy, settings=Settings(timeout=30)) as acc:
        plain = make("mlp")
        model, optimizer = acc.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.0))
        load_weights(model, path, dtype="live")
        acc.backward(model(torch.randn(4, 12)).float().square().mean())
        optimizer.step()
        return holds(model.named_parameters(), values("mlp"))[0]


def built_on_meta(path: str) -> list[str]:
    """Sharded first, block by block, and then loaded: no rank ever holds the whole."""
    with accelerator_of("fsdp", "mlp") as acc:
        with torch.device("meta"):
            model = MODELS["mlp"]()
        model = acc.prepare(model)
        load_weights(model, path)
        return holds(model.named_parameters(), values("mlp"))[0]


def from_torch_save(path: str) -> list[str]:
    """A file of torch.save into sharded weights."""
    with accelerator_of("fsdp", "mlp") as acc:
        model = acc.prepare(make("mlp"))
        load_source(model, open_source(path, trust=True))
        return holds(model.named_parameters(), values("mlp"))[0]


def in_other_orders(paths: dict[str, str]) -> list[str]:
    faults = with_masters("fsdp", paths["mlp"]) + built_on_meta(paths["mlp"]) + from_torch_save(paths["torch"])
    paths = {kind: path for kind, path in paths.items() if kind != "torch"}
    return faults + loaded(["fsdp", "pipeline"], paths, after_prepare=False)


def test_before_prepare_on_the_meta_device_and_with_fp32_masters(ranks, files, tmp_path):
    assert with_masters("single", files["mlp"]) == []
    torch.save({"model": values("mlp")}, tmp_path / "mlp.pt")
    assert ranks(in_other_orders, {**files, "torch": str(tmp_path / "mlp.pt")}) == [[], []]


def test_wrappers_of_the_model_and_of_names_do_not_matter(tmp_path, caplog):
    for wrap in (torch.compile, nn.DataParallel, None):
        model: Any = make("tied")
        if wrap is None:
            model.blocks[0] = torch.compile(model.blocks[0])
        else:
            model = wrap(model)
        load_weights(model, in_one_file(tmp_path, values("tied")))
        plain = {n.removeprefix("module.").replace("_orig_mod.", ""): t for n, t in model.state_dict().items()}
        assert all(torch.equal(plain[name], t) for name, t in values("tied").items())
    for prefix in ("module.", "_orig_mod.", "module._orig_mod."):
        model = make("mlp")
        prefixed = {prefix + name: t for name, t in values("mlp").items()}
        with caplog.at_level("INFO", "easymp"):
            load_weights(model, in_one_file(tmp_path, prefixed))
        check(model, values("mlp"))
        assert f"'{prefix}0.bias' is '0.bias'" in caplog.text


def test_tied_weights_load_by_any_name_and_must_agree(tmp_path):
    state, model = values("tied"), make("tied")
    assert isinstance(model, Tied)
    shared = state.pop("embed.weight")
    for name in ("embed.weight", "head.weight"):
        load_weights(model, in_one_file(tmp_path, {**state, name: shared}))
        assert model.head.weight is model.embed.weight and torch.equal(model.embed.weight, shared)
    twins = {**state, "embed.weight": shared, "head.weight": shared.clone()}
    load_weights(model, in_one_file(tmp_path, twins))
    twins["head.weight"] += 1
    message = r"embed.weight and head.weight are one tensor in the model, and differ"
    refused(message, in_one_file(tmp_path, twins), model)
    untied: Any = make("tied")
    untied.head.weight = nn.Parameter(torch.zeros_like(untied.embed.weight))
    aliases = {"head.weight": "embed.weight"}
    save_file({**state, "embed.weight": shared}, tmp_path / "model.safetensors", aliases)
    load_weights(untied, tmp_path)
    assert torch.equal(untied.head.weight, shared)


def test_tied_complex_weights(tmp_path):
    class TwoNames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.second = nn.Parameter(torch.randn(3, dtype=torch.complex128))

    saved = TwoNames()
    parts = torch.view_as_real(saved.first.detach())
    Accelerator().save_model(saved, tmp_path)
    for names in (("first",), ("first", "second")):
        if len(names) == 2:
            save_file({name: parts.clone() for name in names}, tmp_path / "model.safetensors")
        live = TwoNames()
        assert not load_weights(live, tmp_path)
        assert live.first is live.second and torch.equal(live.first, saved.first)


def test_another_dtype_is_an_error_that_names_both(tmp_path):
    model = make("mlp")
    path = in_one_file(tmp_path, {name: t.bfloat16() for name, t in values("mlp").items()})
    message = r"0.weight: torch.bfloat16 in the files, and torch.float32 in the model: pass dtype='live'"
    refused(message, path, model)
    load_weights(model, path, dtype="live")
    check(model, {name: t.bfloat16().float() for name, t in values("mlp").items()})


def test_names_that_do_not_fit_are_refused_or_skipped(tmp_path, caplog):
    state = values("mlp")
    state["2.wieght"] = state.pop("2.weight")
    message = r"this Sequential: missing: 2.weight; unexpected: 2.wieght .*did you mean '2.wieght'\?.*strict=F"
    refused(message, in_one_file(tmp_path, state))
    state = {**values("mlp"), "new": torch.ones(1), "4.bias": torch.ones(7)}
    del state["0.bias"]
    path, model = in_one_file(tmp_path, state), make("mlp")
    refused(r"4.bias \(\[7\] in the files, \[5\] in the model\)", path, model)
    skipped = load_weights(model, path, strict=False)
    shapes = ("4.bias ([7] in the files, [5] in the model)",)
    assert (skipped.missing, skipped.unexpected, skipped.misshapen) == (("0.bias",), ("new",), shapes)
    assert "skipped: missing: 0.bias; unexpected: new; of another shape: 4.bias" in caplog.text
    check(model, values("mlp") | {name: make("mlp").state_dict()[name] for name in ("0.bias", "4.bias")})


NOTHING_THERE: list[tuple[str, bytes, str]] = [
    ("", b"", r"it is empty or missing"),
    ("pytorch_model.bin", b"x", r"load_state\(folder, allow_pickle=True\)"),
    ("step-00000010/COMMIT", b"x", r"pass that of one of them, such as step-00000010"),
    ("adapter.safetensors", b"x", r"pass a file, such as adapter.safetensors"),
    ("model.safetensors", b"x" * 64, r"model.safetensors: "),
    (INDEX, b"{", r"JSON"),
    (INDEX, b"[]", r"no weight_map"),
    (INDEX, b'{"weight_map": {"a": "../x.safetensors"}}', r"'../x.safetensors', which is not a file beside"),
    (INDEX, b'{"weight_map": {"a": "x.safetensors"}}', r"x.safetensors: there is no such"),
]


def test_a_place_without_weights_says_what_is_there(tmp_path):
    for number, (name, text, message) in enumerate(NOTHING_THERE):
        folder = tmp_path / str(number)
        folder.mkdir()
        if name:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(text)
        refused(message, folder)
    index = by_an_index(tmp_path, values("mlp"))
    table = json.loads(index.read_text())
    table["weight_map"]["5.weight"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(table))
    refused(r"model-00001-of-00003.safetensors has no tensor 5.weight, which shall be there", tmp_path)


def test_what_else_is_refused(tmp_path):
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"amax": 3}

        def set_extra_state(self, state: Any) -> None:
            pass

    path = in_one_file(tmp_path, {"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    refused(r"'_extra_state' in the state_dict of this Extra .* load_state_dict", path, Extra(2, 2))
    for dtype in ("float16", torch.int32, 3):
        refused("dtype=", path, dtype=dtype)
    for device in ({"": 0}, "auto", 1.5):
        refused("device_map=", path, device_map=device)
    with torch.device("meta"):
        model = nn.Linear(2, 2)
        model.register_buffer("angles", torch.ones(2), persistent=False)
    refused(r"buffer 'angles' is on the meta device, and no file holds it", path, model)
    assert model.weight.is_meta
