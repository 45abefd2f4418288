"""easymp.toml: it holds the settings, comments and other keys stay, and the file is replaced at once."""

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


# Files with `seed`, `strategy`, `processes` and `nodes`, alone and beside others; each with comments that have to stay.
FILES = [
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
CHANGES: list[dict[str, Any]] = [
    {"seed": 2},
    {"strategy": "fsdp", "processes": 4},
    {"processes": "auto", "nodes": "auto"},
    {"nodes": "2", "main_address": 'a "quoted" \\ name # é'},
    {"project_dir": "runs", "memory": "16GiB", "main_port": 29500},
]


def settings(content: dict[str, Any]) -> dict[str, Any]:
    """All settings of a file in one table; those that the wizard always writes only where they are not "auto" or 1."""
    flat = {**content, **content.get("launch", {})}
    flat.pop("launch", None)
    flat = {key: value.lower() if key == "strategy" else value for key, value in flat.items()}
    return {key: value for key, value in flat.items() if value not in ("auto", 1) or key == "seed"}


@pytest.mark.parametrize("text", FILES)
def test_other_keys_and_comments_stay(text, config):
    for ending, changes in product(("\n", "\r\n"), CHANGES):
        FILE.write_bytes(text.replace("\n", ending).encode())
        expected = {name: value for name, value in {**settings(read()), **changes}.items() if value != "auto"}
        arguments = [f"--set={name}={value}" for name, value in changes.items()]
        config("8xH100", "--yes", *arguments)
        edited = FILE.read_bytes().decode()
        assert settings(read()) == expected
        comments = re.findall(r"# [^'\"#\r\n]+$", text, re.M)
        assert all(comment in edited for comment in comments), edited
        assert ending == "\n" or ending not in text or "\n" not in edited.replace("\r\n", "")
        assert "has these settings already" in config("8xH100", "--yes", *arguments)


def test_lines_that_are_commented_out_read_as_settings_once_uncommented(config):
    config("8xH100", "--yes")
    text = re.sub(r"(?m)^# (\w+ = )", r"\1", FILE.read_text())
    content = tomllib.loads(text)
    names = {f.name for f in fields(Settings)} - {"sources", "initialize"}
    assert content.keys() - {"launch"} == names and len(content["launch"]) == 7
    FILE.write_text(text)
    assert main(["env"]) == 0


def test_our_reason_goes_with_its_value_and_a_value_takes_the_place_of_its_default(config):
    config("8xH100", "--yes", "--set", "strategy=ddp")
    text = FILE.read_text()
    config("8xH100", "--yes", "--set", "strategy=fsdp", "--set", "debug=true", "--set", "processes=2")
    edited = FILE.read_text()
    assert "\ndebug = true\n" in edited and "\nprocesses = 2  # here: " in edited
    assert "debug = false  # an example" in text and "debug = false" not in edited
    assert edited.count("strategy = ") == 1 and len(edited.splitlines()) == len(text.splitlines())
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


def test_a_new_setting_leaves_a_comment_at_its_table(config):
    FILE.write_text("seed = 1\n\n# about launch\n[launch]\nprocesses = 2\n")
    config("8xH100", "--yes", "--set", "project_dir=gs://bucket/runs")
    assert "\n# about launch\n[launch]\n" in FILE.read_text() and read()["project_dir"] == "gs://bucket/runs"


def test_a_file_that_cannot_be_edited_is_left_alone(config, monkeypatch):
    FILE.write_text('"se\\u0065d" = 1\n')
    assert resolve().seed == 1
    with monkeypatch.context() as patch:
        patch.setattr("tomlkit.dumps", lambda document: "")  # an edit that loses keys
        output = config("8xH100", "--yes", "--set", "seed=2", code=2)
    assert "cannot be edited from here; by hand, write seed = 2" in output
    assert FILE.read_text() == '"se\\u0065d" = 1\n'
    config("8xH100", "--yes", "--set", "seed=2")
    assert resolve().seed == 2


@pytest.mark.parametrize(
    ("text", "setting", "expected"),
    [
        ("strategy = 'ddp'\n", "strategy_options.static_graph=true", {"static_graph": True}),
        ("strategy = 'ddp'\nstrategy_options = { dim = 0 } # x\n", "strategy_options.dim=1", {"dim": 1}),
        ("strategy_options.dim = 0\nstrategy = 'ddp'\n", "strategy_options.dim=1", {"dim": 1}),
        ("[strategy_options]\ndim = 0 # x\n", "strategy_options.static_graph=true", {"dim": 0, "static_graph": True}),
        ("strategy = 'ddp'\n[strategy_options]\ndim = 0\n# end", "strategy=zero1", None),
        ("compile = 'blocks' # x\n", "compile.mode=default", {"what": "blocks", "mode": "default"}),
        ("[compile]\nwhat = 'blocks'\n", "compile=model", "model"),
        ("[launch]\nprocesses = 2\n", "scaler_options.init_scale=8", {"init_scale": 8}),
        ("launch = { processes = 2, nodes = '2' } # x\n", "processes=auto", None),
    ],
)  # fmt: skip
def test_tables_of_options_are_edited(text, setting, expected, config):
    FILE.write_text(text)
    config("8xH100", "--yes", "--set", setting)
    name = setting.split("=")[0].split(".")[0]
    assert read().get("strategy_options" if name == "strategy" else name) == expected
    assert ("# x" in text) <= ("# x" in FILE.read_text())
    assert "has these settings already" in config("8xH100", "--yes", "--set", setting)


BY_HAND = """\
# the paper's settings
seed = 17   # as in table 3
mixed_precision = "fp16"

[launch]
processes = 2
"""


def test_an_existing_file_gives_the_defaults_and_is_kept(talk):
    FILE.write_text(BY_HAND)
    output = talk("2xA100 NVLink", "", "", "bf16:", "", "", "runs")
    assert 'Changes in easymp.toml\n-mixed_precision = "fp16"\n+mixed_precision = "bf16"\n' in output
    assert "# the paper's settings\nseed = 17   # as in table 3\n" in FILE.read_text()
    assert "The backup is easymp.toml.bak" in output and Path("easymp.toml.bak").read_text() == BY_HAND
    assert resolve() == resolve(seed=17, mixed_precision="bf16", project_dir="runs")
    assert read()["launch"] == {"processes": 2}


def test_backups_are_not_overwritten_and_a_file_without_changes_stays(config):
    texts = []
    for seed in ("1", "2", "3", "3"):
        output = config("T4", "--yes", "--set", f"seed={seed}")
        texts.append(FILE.read_text())
    assert "has these settings already" in output
    backups = ["easymp.toml.bak", "easymp.toml.bak.1"]
    assert sorted(path.name for path in Path().iterdir()) == ["easymp.toml", *backups]
    assert [Path(name).read_text() for name in backups] == texts[:2]


def test_an_existing_file_asks_for_something_impossible(config, talk):
    FILE.write_text("mixed_precision = 'fp8'\nstrategy = 'ddp'\n")
    output = config("laptop CPU", "--yes", code=2)
    assert "easymp.toml: mixed_precision = fp8 cannot run here" in output
    assert "or pass --set mixed_precision=auto" in output
    assert "easymp.toml: mixed_precision = fp8 cannot run here" in talk("laptop CPU", "2")
    assert (resolve().mixed_precision, resolve().strategy) == ("auto", "ddp")
    talk("laptop CPU", "1")  # strategy is not asked about then, but not left wrong either
    assert resolve().strategy == "auto"


def test_a_path_that_cannot_be_written_is_named_before_the_first_question(talk):
    Path("file").touch()
    for path, pattern in (
        ("nowhere/easymp.toml", "there is no folder .*nowhere for nowhere/easymp.toml: make it first"),
        ("file/easymp.toml", "there is no folder .*file for file/easymp.toml"),
        (".", r"\. is not an ordinary file: name a file by --file, such as easymp.toml"),
        ("/proc/easymp.toml", "/proc/easymp.toml cannot be written: "),
        (os.devnull, "is not an ordinary file"),
    ):
        output = talk("T4", arguments=f"--file {path}", code=2)
        assert re.search(f"easymp: .*{pattern}", output) and "This machine" not in output


def test_a_write_that_fails_leaves_the_file_as_it_was(config, monkeypatch):
    FILE.write_text("seed = 1\n")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", mock.Mock(side_effect=OSError(28, "No space left on device")))
        output = config("T4", "--yes", "--set", "seed=2", code=2)
    assert "cannot be written: No space left on device" in output
    assert FILE.read_text() == "seed = 1\n" and not list(Path().glob(".easymp*"))


def test_links_and_modes_stay(config):
    Path("shared").mkdir()
    real = Path("shared/settings.toml")
    real.write_text("seed = 1\n")
    real.chmod(0o640)
    FILE.symlink_to(real)
    config("T4", "--yes", "--set", "seed=2")
    assert FILE.is_symlink() and resolve().seed == 2
    assert {path.stat().st_mode & 0o777 for path in Path("shared").iterdir()} == {0o640}


def test_a_folder_with_quotes_and_backslashes_is_read_back(config):
    for name in ("removed", "runs/a 'b' \"c\" \\d\\", "runs/\\u0041 # é"):  # composed, and edited
        config("T4", "--yes", "--set", f"project_dir={name}")
        assert resolve().project_dir == name
