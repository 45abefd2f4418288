"""``easymp estimate``: the bytes for a model, the rows that fit on machines that are written down, and how it is told."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from easymp import memory
from easymp.cli import main

from ..hardware.machines import MACHINES
from ..strategies import models


@pytest.fixture
def ask(on_machine: Callable[[str], None], capsys: Any, folder: Path) -> Callable[..., Any]:
    """Runs ``easymp estimate`` on a machine of the table; returns its JSON, or the error where `code` is 1."""

    def run(words: str, machine: str = "8xH100", code: int = 0) -> Any:
        on_machine(machine)
        assert main(["estimate", *words.split(), "--json"]) == code
        said = capsys.readouterr()
        return said.err if code else json.loads(said.out)

    return run


SCRIPT = """
import torch

def make():
    return torch.nn.Linear(3, 5)

def looks():
    model = torch.nn.Linear(3, 5)
    assert model.weight.sum().item() < 1e9
    return model

class Space:
    model = torch.nn.Linear(3, 5)

calls = []

class Once(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def forward(self, x):
        calls.append(1)
        return self.layer(x).relu()
"""


@pytest.fixture(autouse=True)
def script(tmp_path: Path):
    (tmp_path / "a_script_of_mine.py").write_text(SCRIPT)
    yield "a_script_of_mine"
    sys.modules.pop("a_script_of_mine", None)


def names(record: dict[str, Any]) -> list[tuple[int, str, str]]:
    return [(row["world"], row["strategy"], row["precision"]) for row in record["rows"]]


def test_a_table_and_the_advice(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    words = "estimate 1.5B --memory 80GB --processes 1,8 --optimizer momentum"
    assert main(words.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1.5B: 1,500,000,000 parameters, momentum"
    assert lines[2] == "on  strategy  precision  weights  gradients  states  copies  total   spare"
    assert lines[3].split() == ["1", "single", "fp32", "5.59", "5.59", "5.59", "-", "16.76", "+42.84"]
    assert max(map(len, lines)) <= 80 and "a stand-in" in "\n".join(lines)
    assert "fits with" in " ".join(lines[-2:])


def test_rows_are_those_of_the_arithmetic(ask):
    record = ask("500K --processes 1,8 --optimizer sgd")
    spread = [(8, s, p) for s in ("ddp", "zero1", "fsdp") for p in ("fp32", "bf16")]
    assert names(record) == [(1, "single", "fp32"), (1, "single", "bf16"), *spread]
    available = MACHINES["8xH100"].devices[0].memory
    for row in record["rows"]:
        options = {name: row[name] for name in ("strategy", "precision", "world")}
        need = memory.estimate(500_000, **options, optimizer="sgd")
        assert {name: row[name] for name in need.rows} == need.rows and row["total"] == need.total
        assert row["available"] == available and row["activations"] is None
        assert row["spare"] == int(available * 0.8) - need.total  # a fifth is left to activations
        assert row["fits"] == (row["spare"] >= 0)


@pytest.mark.parametrize(
    ("words", "machine", "said"),
    [
        ("1.5B", "8xH100", "ddp on 8 with bf16 fits with 38.3 GiB to spare; the fewest processes are 1, by single on 1 with bf16"),
        ("7B", "8xH100", "fsdp on 8 with bf16 fits with"),
        ("7B --optimizer sgd --processes 2", "8xH100", "on 2 with"),
        ("70B --processes 8", "8xH100", "nothing fits: fsdp on 8 with bf16 comes nearest"),
        ("70B --processes 64", "8xH100", "fsdp on 64 with bf16 fits"),
        ("350M --processes 1", "V100", "single on 1 with fp16 fits"),
        ("350M --processes 1", "laptop CPU", "single on 1 with fp32 fits"),
        ("350M --processes 1", "Sapphire Rapids", "single on 1 with bf16 fits"),
        ("7B --memory 80GB --processes 8", "laptop CPU", "fsdp on 8 with bf16 fits with 44.6 GiB to spare"),
        ("7B --for 2x4xA100-80GB", "laptop CPU", "fsdp on 8 with bf16 fits with"),
    ],
)  # fmt: skip
def test_what_is_suggested(ask, words, machine, said):
    record = ask(words, machine)
    assert said in record["suggestion"]
    taken = record["suggested"] and "{strategy} on {processes} with {precision}".format(**record["suggested"])
    assert taken is None or taken in record["suggestion"]


def test_processes_of_a_cpu_share_its_memory_and_devices_do_not(ask):
    server, eight = MACHINES["Sapphire Rapids"], MACHINES["8xH100"]
    by_world = {row["world"]: row["available"] for row in ask("1M", "Sapphire Rapids")["rows"]}
    assert by_world == {n: server.cpu.memory // n for n in (1, 2, 4, 8)}
    for words, available in (
        ("1M --processes 1,16", eight.devices[0].memory),
        ("1M --processes 1 --cpu", eight.cpu.memory),
        ("1M --memory 5GB", 5 * 10**9),
        ("7B --for 2x4xA100-80GB", 80 * 10**9),
    ):
        assert {row["available"] for row in ask(words)["rows"]} == {available}


def test_predicted_time(script, ask, capsys):
    ask_for = "1B --precision bf16 --strategy single,ddp,zero1,fsdp,hsdp,tensor_parallel --time 2048"
    record = ask(f"{ask_for} --for 2x8xH100 --processes 1,16")
    time = {row["strategy"]: row["time"] for row in record["rows"]}
    for row in record["rows"]:
        assert row["flops"] == [2 * 10**9 * 2048, 4 * 10**9 * 2048]  # 6 a parameter and token
        seconds = row["time"]["seconds"]
        if row["strategy"] == "tensor_parallel":
            assert seconds is None and "tensor_parallel is not predicted" in row["time"]["why"]
        else:
            assert row["time"]["compute"] == pytest.approx(6 * 10**9 * 2048 / 989.4e12 / 0.5)
            assert seconds == pytest.approx(sum(row["time"][p] for p in ("compute", "links", "optimizer")))
            assert row["tokens_per_second"] == pytest.approx(row["world"] * 2048 / seconds)
    # Whole weights of 4 bytes go over 8 adapters of 50 GB/s; under ddp while backward runs.
    gathered = 4e9 * 15 / 16 / 320e9 + 40e-6
    late = max(0, 2 * gathered - 40e-6 - time["ddp"]["compute"] * 2 / 3)
    assert time["single"]["links"] == 0 and time["ddp"]["links"] == pytest.approx(late)
    assert time["zero1"]["links"] == pytest.approx(late + gathered)
    assert time["single"]["optimizer"] == pytest.approx(28e9 / 2680e9)  # 7 tensors of 4 bytes
    assert time["fsdp"]["optimizer"] == pytest.approx(28e9 / 2680e9 / 16, rel=0.01)
    assert time["hsdp"]["optimizer"] == pytest.approx(28e9 / 2680e9 / 8, rel=0.01)
    assert "the fastest that fits is predicted to be fsdp on 16 with bf16: " in record["suggestion"]
    slow, fast = (ask(f"{ask_for} --for 2x8x{gpu} --processes 16")["rows"] for gpu in ("A100", "B200"))
    assert all(a["time"]["seconds"] > b["time"]["seconds"] for a, b in zip(slow[:4], fast[:4]))

    counted = ask(f"{script}:Once --for H100 --input 32x64 --time --precision fp32")["rows"][0]
    assert counted["flops"] == [2 * 32 * 64 * 64, 2 * 32 * 64 * 64]  # the input needs no gradient
    assert counted["samples_per_second"] == pytest.approx(32 / counted["time"]["seconds"])
    assert "time" not in ask("1M")["rows"][0]
    for words, why in (
        ("1M --for 4xcpu-64GB --time", "has no known rate of fp32 products"),
        ("1M --for 2x80GB --time", "a GPU of 80 GB has no known rate of"),
        (
            '1M --for 2xH100 --strategy fsdp --options {"cpu_offload":true} --time',
            "fsdp with cpu_offload is not predicted",
        ),
    ):
        assert any(why in note for note in ask(words)["notes"]), words
    assert "--time '0' is not a whole number" in ask("1M --time 0", code=1)
    assert main(["estimate", "1B", "--for", "8xH100", "--time"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "seconds tokens/s" in said and "of an update of 4,096 tokens a rank, predicted" in said


def test_recomputation_costs_a_forward(ask, folder, capsys):
    lines = (
        "from torch import nn",
        "def make():",
        "    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)",
    )
    Path("gpt_of_mine.py").write_text("\n".join([*lines, "    return nn.TransformerEncoder(layer, 4)"]))
    words = "gpt_of_mine:make --for H100 --input 2x32x64 --precision bf16 --time"
    plain, again = (ask(words + more)["rows"][0] for more in ("", " --activation-checkpointing"))
    attention = 4 * 4 * 2 * 32 * 32 * 64  # 4 layers, two products
    assert plain["flops"][0] == 2 * 64 * (4 * 4 * 64 * 64 + 4 * 2 * 64 * 128) + attention
    assert again["flops"] == [plain["flops"][0], sum(plain["flops"])]
    assert again["time"]["compute"] > plain["time"]["compute"] and again["total"] < plain["total"]
    both = ask(words)
    first, second = both["rows"][:2]
    assert (first["recomputed"], second["recomputed"]) == ("", "blocks") and second["total"] == again["total"]
    assert second["largest"] > first["largest"] > 2
    filled = ask(words.replace("2x32", f"{first['largest']}x32"))["rows"][0]
    over = ask(words.replace("2x32", f"{first['largest'] * 21 // 20}x32"))["rows"][0]
    assert filled["fits"] and not over["fits"]
    assert filled["samples_per_second"] == pytest.approx(first["largest_per_second"], rel=0.01)
    assert f"in micro-batches of {first['largest']:,}" in both["suggestion"]


def test_what_is_impossible_is_left_out_and_said_where_it_was_asked_for(ask):
    record = ask("1M --precision fp32,bf16,half", "V100")
    assert {precision for _, _, precision in names(record)} == {"fp32", "fp16"}
    assert record["refused"][0].startswith("bf16: ")
    usual = ask("1M", "V100")
    assert {precision for _, _, precision in names(usual)} == {"fp32", "fp16"} and not usual["refused"]
    laptop = ask("1M --processes 1", "laptop CPU")
    assert [precision for _, _, precision in names(laptop)] == ["fp32", "bf16"]  # auto is fp32 there
    words = "1M --precision bf16,fp8 --memory 1GB --processes 2 --strategy fsdp,tensor_parallel"
    elsewhere = ask(words, "V100")
    assert names(elsewhere) == [(2, "fsdp", "bf16"), (2, "fsdp", "fp8"), (2, "tensor_parallel", "bf16")]
    assert elsewhere["refused"][0].startswith("tensor_parallel on 2 with fp8: ")
    alone = ask("1M --strategy single,fsdp --processes 1,2")
    assert names(alone)[0] == (1, "single", "fp32")
    assert [r.split(":")[0] for r in alone["refused"]] == ["fsdp on 1", "single on 2"]


def test_options_of_a_strategy_and_ranks_of_a_node(ask):
    base = "10M --strategy fsdp --processes 2"
    held, offloaded = (ask(base + more)["rows"][0] for more in ("", ' --options {"cpu_offload":true}'))
    assert offloaded["weights"] == 0 < held["weights"]
    near, far = (ask(f"10M --strategy hsdp --processes 8 --per-node {n}")["rows"][0] for n in (2, 8))
    assert near["weights"] > 3 * far["weights"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("7B --memory lots", "--memory 'lots' is not a size"),
        ("7B --options {'a':1} --strategy fsdp", "--options, line 1"),
        ("1M --optimizer adamx", "optimizer 'adamx'"),
        ("1M --input 1", "activations need a forward, and 1M has none"),
        ("1M --activation-checkpointing", "pass the shape of a batch (--input)"),
        ("1M --activation-offload", "pass the shape of a batch (--input)"),
        ('1M --options {"cpu_offload":true}', "options are one strategy's"),
        ('1M --options {"cpu_ofload":true} --strategy fsdp --processes 2', "cpu_ofload"),
        ("1M --strategy single --processes 2", "nothing is left to estimate: single on 2"),
        ("1M --dtype f8", "dtype='f8' is not one of own, fp32, bf16, fp16"),
        ("torch.nn:Flatten --input 8x", "is not an input: pass its shape"),
        ("torch.nn:Flatten --input 8x3:int63", "is not an input: pass its shape"),
        ("absent.safetensors", "absent.safetensors"),
        ("weights.bin", "holds Python objects, which can run code"),
        ("1e30", "is not a number of parameters"),
        ("no_such_module:make", "No module named 'no_such_module'"),
        ("torch.nn:Transformr", "did you mean 'Transformer'"),
        ("torch.nn:Linear", "missing 2 required positional arguments"),
        (
            "there/train.py",
            "is a script: name the function in it that returns the model, as in train:make_model",
        ),
        ("math:pi", "is a float, neither a model nor a callable"),
        ("os:getcwd", "gives a str, not a model"),
        ("a_script_of_mine:Once --input 32x63", "cannot be followed"),
        ("a_script_of_mine:Once --input 32x64 --activation-checkpointing", "has none"),
        ("7B --for 8xH100 --memory 3GB", "--for 8xH100 says it, and so does --memory 3GB"),
        ("7B --for 4xcpu", "names no memory: write it, as in 4xcpu-64GB"),
        ("7B --for 8xH101", "did you mean 'H100'?"),
    ],
)
def test_wrong_words(ask, words, said):
    Path("weights.bin").write_bytes(b"")
    assert said in ask(words, code=1)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        *(("1.5B", 1_500_000_000), ("7b", 7 * 10**9), ("1e6", 10**6), ("1_000,000", 10**6)),
        *((str(n), n) for n in (999, 1_234_567, 10**7, 124_439_808, 10**11)),
    ],
)
def test_a_count_is_treated_as_a_transformer_of_exactly_that_size(ask, text, count):
    record = ask(f"{text} --processes 1,2 --precision fp32")
    single, *_, sharded = record["rows"]
    assert record["parameters"] == count and single["weights"] == 4 * count
    blocks = count >= 10**6  # smaller ones are a number
    assert any("a stand-in: a transformer of" in note for note in record["notes"]) == blocks
    assert (0 < sharded["gathered"] < 4 * count) == blocks  # block by block


def save(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = models.make(kind).to(dtype)
    tied = {id(t): (name, t) for name, t in reversed(list(model.state_dict(keep_vars=True).items()))}
    save_file({name: t.detach() for name, t in tied.values()}, folder / "model.safetensors")
    return model


def test_a_file_needs_as_much_as_its_model(ask, folder):
    # No name says that a table is multiplied with, too: "tied" in fp32 only.
    for kind, precision in (("mlp", "fp32"), ("mlp", "bf16"), ("conv", "bf16"), ("tied", "fp32")):
        model = save(kind, folder)
        for row in ask(f"model.safetensors --processes 2 --precision {precision}")["rows"]:
            need = memory.estimate(model, strategy=row["strategy"], precision=precision, world=2)
            for name in ("weights", "buffers", "gradients", "states", "copies"):
                assert row[name] == getattr(need, name), (kind, precision, name)


def test_types_of_a_file(ask, folder):
    count = sum(p.numel() for p in save("mlp", folder, torch.bfloat16).parameters())
    for dtype, itemsize, notes in (("", 4, 1), (" --dtype own", 2, 0), (" --dtype fp16", 2, 1)):
        record = ask(f"model.safetensors --processes 1 --precision fp32 --optimizer sgd{dtype}")
        assert (record["rows"][0]["weights"], record["parameters"]) == (count * itemsize, count)
        assert sum(note.startswith("the file holds bfloat16") for note in record["notes"]) == notes


def test_shards_with_an_index_and_names_of_all_kinds(ask, folder):
    layers = {f"model.layers.{i}.attn.q.weight": (4, 8) for i in range(2)}
    parts = {
        "a.safetensors": {"model.layers.0.attn.q.bias": (4,), "model.layers.0.norm.weight": (8,)},
        "b.safetensors": {**layers, "model.embed_tokens.weight": (9, 8), "model.forward.weight": (2, 2)},
    }
    buffers = {"model.rotary.inv_freq": torch.ones(3), "model.steps": torch.tensor(1)}
    for file, shapes in parts.items():
        extra = buffers if file == "b.safetensors" else {}
        save_file({**{name: torch.zeros(shape) for name, shape in shapes.items()}, **extra}, folder / file)
    index = {name: file for file, shapes in parts.items() for name in shapes}
    index |= dict.fromkeys(buffers, "b.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    record = ask("model.safetensors.index.json --processes 1,2 --precision bf16")
    assert record["parameters"] == 2 * 32 + 4 + 8 + 72 + 4
    single, *_, sharded = record["rows"]
    assert single["buffers"] == 3 * 4 + 8
    assert single["copies"] == 2 * (2 * 32 + 4 + 4)  # of layers, and not of the table and the norm
    assert 0 < sharded["gathered"] < single["weights"] / 2  # the blocks are found


def test_functions_classes_and_models(script, ask):
    before = list(sys.path)
    made, looked, kept = (ask(f"{script}:{name}") for name in ("make", "looks", "Space.model"))
    assert made["parameters"] == looked["parameters"] == kept["parameters"] == 20
    assert "built in the host's memory" in looked["notes"][0]
    assert not any("host's memory" in note for note in made["notes"] + kept["notes"])
    assert sys.path == before


def test_activations_of_a_batch_are_counted_once_a_precision(script, ask, capsys):
    record = ask(f"{script}:Once --processes 1,2,4 --input 32x64")
    assert len(sys.modules[script].calls) == 2
    of_fp32 = {row["activations"] for row in record["rows"] if row["precision"] == "fp32"}
    assert of_fp32 == {3 * 32 * 64 * 4} and not any("activations" in note for note in record["notes"])
    assert any("--input" in note for note in ask(f"{script}:Once --processes 1")["notes"])
    assert main(["estimate", f"{script}:Once", "--processes", "1", "--input", "32x64"]) == 0
    assert "activations  total" in capsys.readouterr().out
