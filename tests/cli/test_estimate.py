"""``easymp estimate``.

The bytes for a model, the rows that fit on machines that are written down, and how it is told.
"""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types
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


@pytest.fixture
def estimate(on_machine: Callable[[str], None], capsys: Any, folder: Path) -> Callable[..., Any]:
    """Runs ``easymp estimate`` on a machine of the table; returns its JSON, or the error where `code` is 1."""

    def run(arguments: str, machine: str = "8xH100", code: int = 0) -> Any:
        on_machine(machine)
        assert main(["estimate", *arguments.split(), "--json"]) == code
        output, err = capsys.readouterr()
        return err if code else json.loads(output)

    return run


SCRIPT = """
import torch

def make():
    return torch.nn.Linear(3, 5)

def reads_values():
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
    assert main("estimate 1.5B --memory 80GB --processes 1,8 --optimizer momentum".split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1.5B: 1,500,000,000 parameters, momentum"
    assert lines[2] == "on  strategy  precision  weights  gradients  states  copies  total   spare"
    assert lines[3].split() == ["1", "single", "fp32", "5.59", "5.59", "5.59", "-", "16.76", "+42.84"]
    assert max(map(len, lines)) <= 80 and "a stand-in" in "\n".join(lines)
    assert "fits with" in " ".join(lines[-2:])


def test_rows_are_those_of_the_arithmetic(estimate):
    record = estimate("500K --processes 1,8 --optimizer sgd")
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
    ("arguments", "machine", "sentence"),
    [
        ("1.5B", "8xH100",
         "ddp on 8 with bf16 fits with 38.3 GiB to spare; the fewest processes are 1, by single on 1 with bf16"),
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
def test_the_suggestion(estimate, arguments, machine, sentence):
    record = estimate(arguments, machine)
    assert sentence in record["suggestion"]
    row = record["suggested"] and "{strategy} on {processes} with {precision}".format(**record["suggested"])
    assert row is None or row in record["suggestion"]


def test_processes_of_a_cpu_share_its_memory_and_devices_do_not(estimate):
    server, eight = MACHINES["Sapphire Rapids"], MACHINES["8xH100"]
    by_world = {row["world"]: row["available"] for row in estimate("1M", "Sapphire Rapids")["rows"]}
    assert by_world == {n: server.cpu.memory // n for n in (1, 2, 4, 8)}
    for arguments, available in (
        ("1M --processes 1,16", eight.devices[0].memory),
        ("1M --processes 1 --for 4xcpu-64GB", 64 * 10**9),
        ("1M --memory 5GB", 5 * 10**9),
        ("7B --for 2x4xA100-80GB", 80 * 10**9),
    ):
        assert {row["available"] for row in estimate(arguments)["rows"]} == {available}


def test_impossible_rows_are_left_out_and_named_on_request(estimate):
    record = estimate("1M --precision fp32,bf16,half", "V100")
    assert {precision for _, _, precision in names(record)} == {"fp32", "fp16"}
    assert record["refused"][0].startswith("bf16: ")
    defaults = estimate("1M", "V100")
    assert {precision for _, _, precision in names(defaults)} == {"fp32", "fp16"} and not defaults["refused"]
    laptop = estimate("1M --processes 1", "laptop CPU")
    assert [precision for _, _, precision in names(laptop)] == ["fp32", "bf16"]  # auto is fp32 there
    remote = estimate("1M --precision bf16,fp8 --memory 1GB --processes 2 --strategy fsdp,tensor_parallel", "V100")
    assert names(remote) == [(2, "fsdp", "bf16"), (2, "fsdp", "fp8"), (2, "tensor_parallel", "bf16")]
    assert remote["refused"][0].startswith("tensor_parallel on 2 with fp8: ")
    mixed = estimate("1M --strategy single,fsdp --processes 1,2")
    assert names(mixed)[0] == (1, "single", "fp32")
    assert [r.split(":")[0] for r in mixed["refused"]] == ["fsdp on 1", "single on 2"]


def test_options_of_a_strategy_and_ranks_of_a_node(estimate):
    base = "10M --strategy fsdp --processes 2"
    plain, offloaded = (estimate(base + options)["rows"][0] for options in ("", ' --options {"cpu_offload":true}'))
    assert offloaded["weights"] == 0 < plain["weights"]
    small, large = (estimate(f"10M --strategy hsdp --for {nodes}xH100")["rows"][0] for nodes in ("4x2", "8"))
    assert small["weights"] > 3 * large["weights"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
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
        ("1M --dtype bf16", "--precision bf16-true counts weights that are trained in bf16"),
        ("1M --per-node 2", "--for 2x4xH100 says how many ranks a node has"),
        ("1M --cpu", "--for 8xcpu-64GB describes processes on CPUs"),
        ("torch.nn:Flatten --input 8x", "is not an input: pass its shape"),
        ("torch.nn:Flatten --input 8x3:int63", "is not an input: pass its shape"),
        ("absent.safetensors", "absent.safetensors"),
        ("weights.bin", "holds Python objects, which can run code"),
        ("1e30", "is not a number of parameters"),
        ("no_such_module:make", "No module named 'no_such_module'"),
        ("torch.nn:Transformr", "did you mean 'Transformer'"),
        ("torch.nn:Linear", "missing 2 required positional arguments"),
        ("there/train.py", "is a script: name the function in it that returns the model, as in train:make_model"),
        ("math:pi", "is a float, neither a model nor a callable"),
        ("os:getcwd", "gives a str, not a model"),
        ("a_script_of_mine:Once --input 32x63", "cannot be followed"),
        ("a_script_of_mine:Once --input 32x64 --activation-checkpointing", "has none"),
        ("7B --for 8xH100 --memory 3GB", "--for 8xH100 says it, and so does --memory 3GB"),
        ("7B --for 4xcpu", "names no memory: write it, as in 4xcpu-64GB"),
        ("7B --for 8xH101", "did you mean 'H100'?"),
        (
            "config.json",
            "describes a model of transformers, and transformers is not installed: pip install transformers",
        ),
        ("org/model-7b", "hf download org/model-7b config.json --local-dir model-7b; then pass model-7b/config.json"),
    ],
)
def test_wrong_arguments(estimate, arguments, sentence, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    Path("weights.bin").write_bytes(b"")
    Path("config.json").write_text("{}")
    assert sentence in estimate(arguments, code=2)


def test_a_config_of_hugging_face_is_built_by_transformers(estimate, monkeypatch):
    module = types.ModuleType("transformers")
    module.__spec__ = importlib.machinery.ModuleSpec("transformers", None)
    config = types.SimpleNamespace(architectures=["Tiny"])
    module.AutoConfig = types.SimpleNamespace(from_pretrained=lambda folder, local_files_only: config)
    module.AutoModel = types.SimpleNamespace(from_config=None)
    module.Tiny = lambda config: nn.Linear(3, 5)
    monkeypatch.setitem(sys.modules, "transformers", module)
    Path("config.json").write_text("{}")
    record = estimate("config.json --processes 1 --input 2x3")
    assert record["parameters"] == 20 and record["rows"][0]["activations"] > 0
    assert record["notes"][0] == "config.json: Tiny of transformers, without weights"
    module.Tiny = lambda config: 1 / 0
    assert "cannot build the model of config.json (ZeroDivisionError" in estimate("config.json", code=2)


def test_predictions_of_time_are_gone(capsys):
    for command in ("estimate 7B --time=8192", "compare train.py --predict train:make", "config --measure"):
        assert main(command.split()) == 2
        assert "it was removed. Instead: easymp compare measures" in capsys.readouterr().err
    with pytest.raises(AttributeError, match="easymp compare measures the time of an update"):
        memory.predict  # noqa: B018


@pytest.mark.parametrize(
    ("text", "count"),
    [
        *(("1.5B", 1_500_000_000), ("7b", 7 * 10**9), ("1e6", 10**6), ("1_000,000", 10**6)),
        *((str(n), n) for n in (999, 1_234_567, 10**7, 124_439_808, 10**11)),
    ],
)
def test_a_count_is_treated_as_a_transformer_of_exactly_that_size(estimate, text, count):
    record = estimate(f"{text} --processes 1,2 --precision fp32")
    single, *_, sharded = record["rows"]
    assert record["parameters"] == count and single["weights"] == 4 * count
    blocks = count >= 10**6  # smaller ones are a number
    assert any("a stand-in: a transformer of" in note for note in record["notes"]) == blocks
    assert (0 < sharded["gathered"] < 4 * count) == blocks  # block by block


def test_a_file_of_weights_gives_its_number_of_parameters(estimate, folder):
    shards = {"a": {"x.weight": torch.zeros(1100, 1000)}, "b": {"y": torch.zeros(8).bfloat16(), "z": torch.tensor(1)}}
    for name, tensors in shards.items():
        save_file(tensors, folder / f"{name}.safetensors")
    index = {name: f"{file}.safetensors" for file, tensors in shards.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    record = estimate("model.safetensors.index.json --processes 1,2 --precision fp32")
    assert record["parameters"] == 1_100_008 and record["rows"][0]["weights"] == 4 * 1_100_008
    assert "2 tensors of bfloat16, float32, counted as trained from fp32" in record["notes"][0]
    assert "a stand-in: a transformer of" in record["notes"][1]
    assert estimate("b.safetensors --processes 1")["parameters"] == 8  # too few for blocks


def test_functions_classes_and_models(script, estimate):
    path = list(sys.path)
    function, reader, attribute = (estimate(f"{script}:{name}") for name in ("make", "reads_values", "Space.model"))
    assert function["parameters"] == reader["parameters"] == attribute["parameters"] == 20
    assert "built in the host's memory" in reader["notes"][0]
    assert not any("host's memory" in note for note in function["notes"] + attribute["notes"])
    assert sys.path == path


def test_activations_of_a_batch_are_counted_once_a_precision(script, estimate, capsys):
    record = estimate(f"{script}:Once --processes 1,2,4 --input 32x64")
    assert len(sys.modules[script].calls) == 2
    of_fp32 = {row["activations"] for row in record["rows"] if row["precision"] == "fp32"}
    assert of_fp32 == {3 * 32 * 64 * 4} and not any("activations" in note for note in record["notes"])
    assert any("--input" in note for note in estimate(f"{script}:Once --processes 1")["notes"])
    assert main(["estimate", f"{script}:Once", "--processes", "1", "--input", "32x64"]) == 0
    assert "activations  total" in capsys.readouterr().out
