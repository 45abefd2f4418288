"""easymp.toml: it reads as was asked, comments and other keys stay, and the file is replaced at once."""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from easymp import Settings, resolve
from easymp.cli import main

FILE = Path("easymp.toml")


def read() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text())


# Ways to write `seed`, `strategy`, `processes` and `nodes`, alone and beside others; each with comments that have to stay.
WRITTEN = [
    "",
    "# only a comment\n",
    "# a head\n\n# of seed\nseed = 1  # behind it\n",
    "seed=1\n\n\n# the end",
    "'seed' = 1 # quoted\n\"strategy\" = 'ddp'  # in single quotes\n",
    "seed = 0x10\nstrategy = 'DDP' # capitals\n",
    'project_dir = """\na #no comment\n"""\nseed = 1 # after a long one\n',
    '"seed" = +1_0 # signed\nstrategy = """ddp""" # thrice\nproject_dir = \'\'\'\nruns\'\'\' # in two lines\n',
    '[launch]\n# strategy = "auto"\nprocesses = 2 # in the wrong place above\n',
    "# top\nseed = 1\n\n# of the table\n[launch] # header\n# of processes\nprocesses = 2\n\n# the end\n",
    "seed = 1\n[ launch ]\n\"processes\" = 2\nnodes = '1:2' # elastic",
    "launch.processes = 2 # dotted\nseed = 1\n",
    "launch = { processes = 2, nodes = '1:4' } # inline\nseed = 1 # last\n",
    "launch={}\n",
    "# strategy = \"fsdp\" was slower\n# seed = 3\nstrategy = 'ddp'\n# [launch]\n",
    "memory = '16GiB'\n# x\n[launch]\nmain_address = 'a#b' # a hash in a string\n",
]
WISHES: list[dict[str, Any]] = [
    {"seed": 2},
    {"strategy": "fsdp", "processes": 4},
    {"processes": "auto", "nodes": "auto"},
    {"nodes": "2", "main_address": 'a "quoted" \\ name # é'},
    {"project_dir": "runs", "memory": "16GiB", "main_port": 29500},
]


def sorted_out(content: dict[str, Any]) -> dict[str, Any]:
    """All settings of a file in one table; those that the wizard always writes only where they are not "auto" or 1."""
    flat = {**content, **content.get("launch", {})}
    flat.pop("launch", None)
    flat = {key: value.lower() if key == "strategy" else value for key, value in flat.items()}
    return {key: value for key, value in flat.items() if value not in ("auto", 1) or key == "seed"}


@pytest.mark.parametrize("before", WRITTEN)
def test_other_keys_and_comments_stay(before, config):
    for ending, wish in product(("\n", "\r\n"), WISHES):
        FILE.write_bytes(before.replace("\n", ending).encode())
        found = sorted_out(read())
        words = [word for name, value in wish.items() for word in ("--set", f"{name}={value}")]
        config("8xH100", "--yes", *words)
        after = FILE.read_bytes().decode()
        wanted = {name: value for name, value in {**found, **wish}.items() if value != "auto"}
        assert sorted_out(read()) == wanted
        comments = re.findall(r"# [^'\"#\r\n]+$", before, re.M)
        assert all(comment in after for comment in comments), after
        assert ending == "\n" or ending not in before or "\n" not in after.replace("\r\n", "")
        assert "says so already" in config("8xH100", "--yes", *words)


def test_lines_that_are_commented_out_read_as_settings_once_uncommented(config):
    config("8xH100", "--yes")
    text = re.sub(r"(?m)^# (\w+ = )", r"\1", FILE.read_text())
    found = tomllib.loads(text)
    names = {f.name for f in fields(Settings)} - {"sources"}
    assert found.keys() - {"launch"} == names and len(found["launch"]) == 8
    FILE.write_text(text)
    assert main(["env"]) == 0


def test_our_reason_goes_with_its_value_and_a_value_takes_the_place_of_its_default(config):
    config("8xH100", "--yes", "--set", "strategy=ddp")
    text = FILE.read_text()
    config("8xH100", "--yes", "--set", "strategy=fsdp", "--set", "debug=true", "--set", "processes=2")
    after = FILE.read_text()
    assert "\ndebug = true\n" in after and "\nprocesses = 2  # here: " in after
    assert "debug = false  # an example" in text and "debug = false" not in after
    assert after.count("strategy = ") == 1 and len(after.splitlines()) == len(text.splitlines())
    config("8xH100", "--yes", "--set", "processes=auto")
    assert FILE.read_text().count("# processes = 1  # an example\n") == 1


def test_options_of_a_strategy_go_with_it_and_join_those_of_another_file(config):
    text = 'strategy = "fsdp"\n[strategy_options]\nreshard_after_forward = false  # fast\n'
    FILE.write_text(text)
    Path("ds.json").write_text(
        '{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "gradient_clipping": 1.0}'
    )
    config("8xH100", "--yes", "--from", "ds.json")
    assert read()["strategy_options"] == {"reshard_after_forward": False, "cpu_offload": True}
    assert "# fast" in FILE.read_text()
    config("8xH100", "--yes", "--set", "strategy=ddp")
    assert "strategy_options" not in read() and read()["strategy"] == "ddp"


def test_an_unforeseen_way_to_write_is_left_alone(config):
    FILE.write_text('"se\\u0065d" = 1\n')
    assert resolve().seed == 1
    said = config("8xH100", "--yes", "--set", "seed=2", code=1)
    assert "cannot be edited from here; by hand, write seed = 2" in said
    assert FILE.read_text() == '"se\\u0065d" = 1\n'


@pytest.mark.parametrize(
    ("before", "words", "after"),
    [
        ("strategy = 'ddp'\n", "strategy_options.static_graph=true", {"static_graph": True}),
        ("strategy = 'ddp'\nstrategy_options = { dim = 0 } # x\n", "strategy_options.dim=1", {"dim": 1}),
        ("strategy_options.dim = 0\nstrategy = 'ddp'\n", "strategy_options.dim=1", {"dim": 1}),
        ("[strategy_options]\ndim = 0 # x\n", "strategy_options.static_graph=true", {"dim": 0, "static_graph": True}),
        ("strategy = 'ddp'\n[strategy_options]\ndim = 0\n# end", "strategy=zero1", None),
        ("compile = 'blocks' # x\n", "compile.mode=default", {"what": "blocks", "mode": "default"}),
        ("[compile]\nwhat = 'blocks'\n", "compile=model", "model"),
        ("[launch]\nprocesses = 2\n", "scaler_options.init_scale=8", {"init_scale": 8}),
    ],
)  # fmt: skip
def test_tables_of_options_are_edited(before, words, after, config):
    FILE.write_text(before)
    config("8xH100", "--yes", "--set", words)
    name = words.split("=")[0].split(".")[0]
    assert read().get("strategy_options" if name == "strategy" else name) == after
    assert ("# x" in before) <= ("# x" in FILE.read_text())
    assert "says so already" in config("8xH100", "--yes", "--set", words)


BY_HAND = """\
# the paper's settings
seed = 17   # as in table 3
mixed_precision = "fp16"

[launch]
processes = 2
"""


def test_an_existing_file_gives_the_defaults_and_is_kept(talk):
    FILE.write_text(BY_HAND)
    said = talk("2xA100 NVLink", "", "", "bf16:", "", "", "runs")
    assert 'Changes in easymp.toml\n-mixed_precision = "fp16"\n+mixed_precision = "bf16"\n' in said
    assert "# the paper's settings\nseed = 17   # as in table 3\n" in FILE.read_text()
    assert "The one before is easymp.toml.bak" in said and Path("easymp.toml.bak").read_text() == BY_HAND
    assert resolve() == resolve(seed=17, mixed_precision="bf16", project_dir="runs")
    assert read()["launch"] == {"processes": 2}


def test_backups_are_not_overwritten_and_a_file_that_says_so_already_stays(config):
    texts = []
    for seed in ("1", "2", "3", "3"):
        said = config("T4", "--yes", "--set", f"seed={seed}")
        texts.append(FILE.read_text())
    assert "says so already" in said
    kept = ["easymp.toml.bak", "easymp.toml.bak.1"]
    assert sorted(path.name for path in Path().iterdir()) == ["easymp.toml", *kept]
    assert [Path(name).read_text() for name in kept] == texts[:2]


def test_an_existing_file_asks_for_something_impossible(config, talk):
    FILE.write_text("mixed_precision = 'fp8'\nstrategy = 'ddp'\n")
    said = config("laptop CPU", "--yes", code=1)
    assert "easymp.toml: mixed_precision = fp8 cannot run here" in said
    assert "or pass --set mixed_precision=auto" in said
    assert "easymp.toml: mixed_precision = fp8 cannot run here" in talk("laptop CPU", "2")
    assert (resolve().mixed_precision, resolve().strategy) == ("auto", "ddp")
    talk("laptop CPU", "1")  # strategy is not asked about then, but not left wrong either
    assert resolve().strategy == "auto"


def test_wrong_keys_are_named_with_their_line(config):
    for text, words in (
        ("# x\nsede = 1\n", "easymp.toml, line 2: 'sede' is not a setting, did you mean 'seed'?"),
        ("[launch]\nproceses = 1\n", "did you mean 'processes'?"),
    ):
        FILE.write_text(text)
        assert words in config("T4", "--yes", code=1)


def test_a_place_that_cannot_be_written_is_said_before_anything_is_asked(talk):
    Path("file").touch()
    for path, words in (
        ("nowhere/easymp.toml", "there is no folder .*nowhere for nowhere/easymp.toml: make it first"),
        ("file/easymp.toml", "there is no folder .*file for file/easymp.toml"),
        (".", r"\. is not an ordinary file: name a file by --file, such as easymp.toml"),
        ("/proc/easymp.toml", "/proc/easymp.toml cannot be written: "),
        (os.devnull, "is not an ordinary file"),
    ):
        said = talk("T4", words=f"--file {path}", code=1)
        assert re.search(f"easymp: .*{words}", said) and "This machine" not in said


def test_a_write_that_fails_leaves_the_file_as_it_was(config, monkeypatch):
    FILE.write_text("seed = 1\n")
    for name, fault in (
        ("fsync", OSError(28, "No space left on device")),
        ("replace", OSError(5, "Input/output error")),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, mock.Mock(side_effect=fault))
            said = config("T4", "--yes", "--set", "seed=2", code=1)
        assert f"cannot be written: {fault.strerror}" in said
        assert FILE.read_text() == "seed = 1\n"
        assert [path.name for path in Path().iterdir()] == ["easymp.toml"]


def test_a_file_that_changes_while_questions_are_asked_is_left_alone(talk, monkeypatch):
    FILE.write_text("seed = 1\n")
    look = os.access
    monkeypatch.setattr(os, "access", lambda *args: FILE.write_text("seed = 3\n") and look(*args))
    said = talk("T4", "", "", "runs", code=1)
    assert "was changed meanwhile and is left as it is" in said and FILE.read_text() == "seed = 3\n"


def test_links_modes_and_owners_stay(config):
    Path("shared").mkdir()
    real = Path("shared/settings.toml")
    real.write_text("seed = 1\n")
    real.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(real, 65534, 65534)
    before = real.stat()
    FILE.symlink_to(real)
    config("T4", "--yes", "--set", "seed=2")
    assert FILE.is_symlink() and resolve().seed == 2
    for path in (real, Path("shared/settings.toml.bak")):
        found = path.stat()
        assert (found.st_mode, found.st_uid, found.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
