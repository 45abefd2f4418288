"""What ``easymp launch`` makes of its words; the launching itself is in test_launcher."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from easymp import resolve
from easymp.cli import launch, main
from easymp.launcher.rendezvous import RendezvousConfig


@pytest.fixture
def launched(monkeypatch):
    """The calls of launch_script, and the settings of each."""
    calls, settings = [], []

    def launch_script(*args, **options):
        calls.append((args, options))
        settings.append(resolve())
        return 9

    monkeypatch.setattr(launch, "launch_script", launch_script)
    return SimpleNamespace(calls=calls, settings=settings)


def at(*args, **settings):
    """Where nodes meet."""
    return {"rendezvous": RendezvousConfig(*args, **settings)}


@pytest.mark.parametrize(
    ("arguments", "args", "options"),
    [
        ("train.py", ("train.py", [], None), {}),
        ("--processes 2 train.py --lr 1", ("train.py", ["--lr", "1"], 2), {}),
        ("-m pkg.train -m x", ("pkg.train", ["-m", "x"], None), {"module": True}),
        ("train.py --processes 9 --help", ("train.py", ["--processes", "9", "--help"], None), {}),
        ("train.py --nodes 2 --config x", ("train.py", ["--nodes", "2", "--config", "x"], None), {}),
        ("train.py a -- b --", ("train.py", ["a", "--", "b", "--"], None), {}),
        ("-- train.py -- b", ("train.py", ["--", "b"], None), {}),
        ("--max-restarts 3 -m --processes 4 t", ("t", [], 4), {"module": True, "max_restarts": 3}),
        ("--grace 90 t.py", ("t.py", [], None), {"grace": 90.0}),
        ("--nodes 2 --main-address a:7 --node-rank 1 --wait 5 t.py", ("t.py", [], None), at(2, 1, "a", 7, wait=5.0)),
        ("--nodes 1:4 --main-address a t.py", ("t.py", [], None),
         {**at(1, None, "a", 29500, max_nodes=4), "max_restarts": 3}),
        ("--nodes 1:4 --main-address a --max-restarts 0 t.py", ("t.py", [], None),
         at(1, None, "a", 29500, max_nodes=4)),
    ],
)  # fmt: skip
def test_words(launched, arguments, args, options):
    assert main(["launch", *arguments.split()]) == 9
    plain = {"module": False, "max_restarts": 0, "grace": 30.0, "variables": {}, **at()}
    assert launched.calls == [(args, plain | options)]


def test_one_node_has_no_use_for_another_s_address_and_says_so(launched, caplog):
    assert main(["launch", "--main-address", "192.0.2.1", "t.py"]) == 9
    assert launched.calls[0][1]["rendezvous"] == RendezvousConfig()
    assert "main_address='192.0.2.1' is not this machine, and not used" in caplog.text
    caplog.clear()
    assert main(["launch", "--main-address", "localhost:7777", "t.py"]) == 9
    assert launched.calls[1][1]["rendezvous"].port == 7777 and not caplog.text


@pytest.mark.parametrize(
    ("arguments", "reason", "remedy"),
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
        ("--config mine.toml", "mine.toml, line 1: 'sed' is not a setting", "did you mean 'seed'?"),
        ("--set strategy=ddpp", "--set strategy=ddpp: 'ddpp' is not one of", ""),
        ("--set processes=2", "'processes' is not a setting: it is a flag of `easymp launch`", ""),
        ("--set seed", "there is no value; write --set seed=VALUE", ""),
    ],
)
def test_wrong_words_are_refused_with_the_way_out(capsys, folder, arguments, reason, remedy):
    Path("mine.toml").write_text("sed = 3\n")
    assert main(["launch", *arguments.split(), __file__]) == 2
    output = capsys.readouterr().err
    assert reason in output
    assert remedy in output
    assert output.count("\n") == 1


def test_the_file_of_config_is_the_launchers_and_the_workers(launched, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = 'processes = 2\nnodes = 2\nmain_address = "a"\nmain_port = 7\nmax_restarts = 1\n'
    Path("mine.toml").write_text(f"seed = 3\n[launch]\n{keys}")
    assert main(["launch", "--config", "mine.toml", "--node-rank", "1", "--processes", "3", "t.py"]) == 9
    args, options = launched.calls[0]
    assert (args[2], options["max_restarts"]) == (3, 1)
    assert options["rendezvous"] == RendezvousConfig(2, 1, "a", 7)
    assert (launched.settings[0].seed, resolve().seed) == (3, None)
    assert main(["launch", "--config", "mine.toml", "--nodes", "1", "t.py"]) == 9
    # its main machine is another one
    assert launched.calls[1][1]["rendezvous"] == RendezvousConfig(1, None, "127.0.0.1", 7)


def test_workers_get_what_is_set(launched, monkeypatch):
    monkeypatch.setenv("EASYMP_OVERRIDE", "seed=1 timeout=9")
    arguments = ["--set", "seed=2", "--set", 'strategy_options={"wrap": ["A"]}', "--set", "project_dir=a b"]
    assert main(["launch", *arguments, "t.py"]) == 9
    (values,) = launched.settings
    assert (values.seed, values.timeout, values.project_dir) == (2, 9.0, "a b")
    assert values.strategy_options == {"wrap": ("A",)}


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

class Part(torch.nn.Linear):
    def forward(self, x):
        calls.append(1)
        return super().forward(x)

with Accelerator(cpu=True, strategy="auto", activation_checkpointing=False) as acc:
    data = torch.utils.data.DataLoader(range(8), batch_size=4)
    model, loader = acc.prepare(torch.nn.Sequential(Part(4, 4), Part(4, 4)), data)
    acc.backward(model(torch.ones(2, 4)).sum())
    seen = {"scale": acc.scaler.get_scale(), "batches": len(loader), "calls": len(calls), "unused": unused}
    open(f"{sys.argv[1]}{acc.process_index}", "w").write(json.dumps(seen))
"""


@pytest.mark.slow
def test_every_setting_reaches_every_process(tmp_path, monkeypatch):
    """From --set and from the file.

    The script names its strategy and activation_checkpointing, and only --set wins over that.
    """
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(REACHED)
    options = "[scaler_options]\ninit_scale = 8.0\n[dataloader_config]\nsplit_batches = true\n"
    Path("easymp.toml").write_text(f'mixed_precision = "fp16"\n{options}')
    sets = ("activation_checkpointing=Part", "strategy_options.find_unused_parameters=true")
    arguments = [argument for pair in sets for argument in ("--set", pair)]
    assert main(["launch", "--processes", "2", *arguments, "train.py", "rank"]) == 0
    for rank in (0, 1):
        values = json.loads(Path(f"rank{rank}").read_text())
        assert values == {"scale": 8.0, "batches": 2, "calls": 4, "unused": [True]}
