"""What ``easymp launch`` makes of its words; the launching itself is in test_launcher."""

from __future__ import annotations

import json

import pytest

from easymp import resolve
from easymp.cli import launch, main
from easymp.launcher.rendezvous import RendezvousConfig


@pytest.fixture
def launched(monkeypatch):
    """The calls of launch_script."""
    calls = []
    monkeypatch.setattr(launch, "launch_script", lambda *args, **options: calls.append((args, options)) or 9)
    return calls


@pytest.mark.parametrize(
    ("words", "args", "options"),
    [
        ("train.py", ("train.py", [], None), {}),
        ("--processes 2 train.py --lr 1", ("train.py", ["--lr", "1"], 2), {}),
        ("-m pkg.train -m x", ("pkg.train", ["-m", "x"], None), {"module": True}),
        ("train.py --processes 9 --help", ("train.py", ["--processes", "9", "--help"], None), {}),
        ("train.py --nodes 2 --config x", ("train.py", ["--nodes", "2", "--config", "x"], None), {}),
        ("train.py a -- b --", ("train.py", ["a", "--", "b", "--"], None), {}),
        ("-- train.py -- b", ("train.py", ["--", "b"], None), {}),
        ("--max-restarts 3 -m --processes 4 t", ("t", [], 4), {"module": True, "max_restarts": 3}),
        ("--grace 90 --no-numa t.py", ("t.py", [], None), {"grace": 90.0, "numa": False}),
        (
            "--nodes 2 --main-address a:7 --node-rank 1 --wait 5 t.py",
            ("t.py", [], None),
            {"rendezvous": RendezvousConfig(2, 1, "a", 7, wait=5.0)},
        ),
        (
            "--nodes 1:4 --main-address a t.py",
            ("t.py", [], None),
            {"rendezvous": RendezvousConfig(1, None, "a", 29500, most=4), "max_restarts": 3},
        ),
        (
            "--nodes 1:4 --main-address a --max-restarts 0 t.py",
            ("t.py", [], None),
            {"rendezvous": RendezvousConfig(1, None, "a", 29500, most=4)},
        ),
    ],
)
def test_words(launched, words, args, options):
    assert main(["launch", *words.split()]) == 9
    plain = {"module": False, "max_restarts": 0, "grace": 30.0, "numa": True, "variables": {}}
    plain["rendezvous"] = RendezvousConfig()
    assert launched == [(args, plain | options)]


def test_one_node_has_no_use_for_another_s_address_and_says_so(launched, caplog):
    assert main(["launch", "--main-address", "192.0.2.1", "t.py"]) == 9
    assert launched[0][1]["rendezvous"] == RendezvousConfig()
    assert "main_address='192.0.2.1' is not this machine, and not used" in caplog.text
    caplog.clear()
    assert main(["launch", "--main-address", "localhost:7777", "t.py"]) == 9
    assert launched[1][1]["rendezvous"].port == 7777 and not caplog.text


@pytest.mark.parametrize(
    ("words", "why", "way"),
    [
        ("--node-rank 1", "says which of several machines this is", "--nodes"),
        ("--nodes 2 --node-rank 1", "2 nodes must know where to meet", "--main-address"),
        ("--nodes 2 --main-address a --node-rank 2", "node_rank=2 does not lie in 0 … 1 for 2 nodes", ""),
        ("--nodes 1:4 --main-address a --node-rank -1", "node_rank=-1 does not lie in 0 … 3", ""),
        ("--nodes two", "nodes='two' is not a number of nodes", "use 2, or 1:4"),
        ("--nodes 4:2", "nodes='4:2' is not a number of nodes", "use 2, or 1:4"),
        ("--nodes 0", "nodes='0' is not a number of nodes", "use 2, or 1:4"),
        ("--nodes 2 --main-address a:b", "main_address='a:b' is not an address", "use HOST, HOST:PORT"),
        ("--nodes 2 --main-address a:70000", "has no possible port", "from 1 to 65535"),
        ("--grace -1", "below the smallest possible value, 0", ""),
        ("--max-restarts -1", "below the smallest possible value, 0", ""),
        ("--processes 0", "below the smallest possible value, 1", ""),
        ("--config nowhere.toml", "'nowhere.toml' is not a file", "easymp config"),
    ],
)
def test_wrong_words_are_refused_with_the_way_out(capsys, words, why, way):
    assert main(["launch", *words.split(), __file__]) == 1
    said = capsys.readouterr().err
    assert why in said
    assert way in said
    assert said.count("\n") == 1


def test_the_file_of_config_is_the_launchers_and_the_workers(launched, tmp_path, monkeypatch):
    file = tmp_path / "mine.toml"
    file.write_text(
        'seed = 3\n[launch]\nprocesses = 2\nnodes = "2"\nmain_address = "a"\nmain_port = 7\nmax_restarts = 1\nnuma = false\n'
    )
    monkeypatch.chdir(tmp_path)
    seen = []
    monkeypatch.setattr(
        launch, "launch_script", lambda *args, **options: seen.append((args, options, resolve().seed)) or 9
    )
    assert main(["launch", "--config", "mine.toml", "--node-rank", "1", "--processes", "3", "t.py"]) == 9
    (args, options, seed) = seen[0]
    assert (args[2], options["max_restarts"], options["numa"], seed) == (3, 1, False, 3)
    assert options["rendezvous"] == RendezvousConfig(2, 1, "a", 7)
    assert resolve().seed is None
    assert main(["launch", "--config", "mine.toml", "--nodes", "1", "t.py"]) == 9
    assert seen[1][1]["rendezvous"] == RendezvousConfig(
        1, None, "127.0.0.1", 7
    )  # its main machine is another one


def test_a_wrong_setting_is_said_once_and_before_anything_starts(tmp_path, capsys):
    (tmp_path / "mine.toml").write_text("sed = 3\n")
    assert main(["launch", "--config", str(tmp_path / "mine.toml"), __file__]) == 1
    assert "mine.toml, line 1: 'sed' is not a setting, did you mean 'seed'?" in capsys.readouterr().err


REACHED = """
import json, sys, torch
from easymp import Accelerator
from torch.nn.parallel import DistributedDataParallel

calls, unused = [], []
init = DistributedDataParallel.__init__

def noted(self, *args, **named):
    unused.append(named.get("find_unused_parameters"))
    init(self, *args, **named)

DistributedDataParallel.__init__ = noted

class Part(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
    def forward(self, x):
        calls.append(1)
        return self.linear(x)

with Accelerator(cpu=True, strategy="auto", activation_checkpointing=False) as acc:
    model = acc.prepare(torch.nn.Sequential(Part(), Part()))
    acc.backward(model(torch.ones(2, 4)).sum())
    seen = {"scale": acc.scaler.get_scale(), "split": acc.split_batches, "calls": len(calls), "unused": unused}
    open(f"{sys.argv[1]}{acc.process_index}", "w").write(json.dumps(seen))
"""
SETTINGS = {
    "mixed_precision": "fp16",
    "activation_checkpointing": "Part",
    "scaler_options": {"init_scale": 8.0},
    "dataloader_config": {"split_batches": True},
    "strategy_options": {"find_unused_parameters": True},
}
FILE = """
mixed_precision = "fp16"
[scaler_options]
init_scale = 8.0
[dataloader_config]
split_batches = true
[strategy_options]
find_unused_parameters = true
"""


def test_workers_get_what_is_set(monkeypatch):
    seen = []
    monkeypatch.setattr(launch, "launch_script", lambda *args, **options: seen.append(resolve()) or 0)
    monkeypatch.setenv("EASYMP_OVERRIDE", "seed=1 timeout=9")
    words = ["--set", "seed=2", "--set", 'strategy_options={"wrap": ["A"]}', "--set", "project_dir=a b"]
    assert main(["launch", *words, "t.py"]) == 0
    assert (seen[0].seed, seen[0].timeout, seen[0].project_dir) == (2, 9.0, "a b")
    assert seen[0].strategy_options == {"wrap": ("A",)}


@pytest.mark.slow
@pytest.mark.parametrize(("way", "processes"), [("--set", 2), ("file", 2), ("environment", 1)])
def test_every_setting_reaches_every_process(way, processes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(REACHED)
    words = []
    # The script names its strategy and activation_checkpointing, and only --set wins over that.
    settings = {k: v for k, v in SETTINGS.items() if way == "--set" or k != "activation_checkpointing"}
    if way == "file":
        (tmp_path / "easymp.toml").write_text(FILE)
    for name, value in settings.items():
        if way == "environment":
            monkeypatch.setenv(f"EASYMP_{name.upper()}", json.dumps(value).strip('"'))
        elif way == "--set" and isinstance(value, dict):
            words += [w for k, v in value.items() for w in ("--set", f"{name}.{k}={json.dumps(v)}")]
        elif way == "--set":
            words += ["--set", f"{name}={value}"]
    assert main(["launch", "--processes", str(processes), *words, "train.py", "out"]) == 0
    for rank in range(processes):
        seen = json.loads((tmp_path / f"out{rank}").read_text())
        assert seen == {
            "scale": 8.0,
            "split": True,
            "calls": 4 if way == "--set" else 2,
            "unused": [True] * (processes > 1),
        }


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ("strategy=ddpp", "--set strategy=ddpp: 'ddpp' is not one of"),
        ("processes=2", "'processes' is not a setting: it is a flag of `easymp launch`"),
        ("seed", "there is no value; write --set seed=VALUE"),
    ],
)
def test_a_wrong_pair_names_the_flag(pair, words, capsys):
    assert main(["launch", "--set", pair, __file__]) == 1
    assert words in capsys.readouterr().err
