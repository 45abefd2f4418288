"""easymp.toml: what is written reads as what was asked, comments and other keys stay, and the file is replaced at once."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from easymp import SettingError, resolve, settings
from easymp.cli.config.file import KNOWN, compose, edit, target, unset, write
from easymp.settings import Launching, checked, resolve_launching, written

FILE = Path("easymp.toml")


def values_of(f) -> st.SearchStrategy:
    """Values that the setting can have, None (left out) among them."""
    least, most, kind = f.metadata["least"], f.metadata["most"], str(f.type).split(" ")[0]
    if f.metadata["choices"]:
        return st.none() | st.sampled_from(f.metadata["choices"])
    if f.name == "nodes":
        return st.none() | st.sampled_from(["1", "2", "1:4", "12"])
    known = {
        "str": st.text(st.characters(exclude_categories=["Cs"])),
        "bool": st.booleans(),
        "int": st.integers(least or 0, most or 2**40),
        "float": st.floats(least or 0, most or 1e9),
        "Size": st.integers(1, 2**60) | st.sampled_from([16 << 30, 10**9, 1 << 20, 3 << 40]),
    }
    return st.none() | known[kind]


VALUES = st.fixed_dictionaries({}, optional={name: values_of(f) for name, f in KNOWN.items()})
WHYS = st.dictionaries(
    st.sampled_from(sorted(KNOWN)), st.text(st.characters(exclude_categories=["Cs", "Cc"])), max_size=4
)
OPTIONS = {"cpu_offload": True, "wrap": ["A", "B"], "size": 2, "plan": {"a.b": "row"}}


def read(text: str) -> dict[str, object]:
    FILE.write_bytes(text.encode())
    return written(settings.read(FILE))


def kept(values: dict[str, object]) -> dict[str, object]:
    return {name: checked(KNOWN[name], value, "") for name, value in values.items() if value is not None}


@hypothesis_settings(max_examples=25)
@given(VALUES, WHYS)
def test_a_new_file_reads_as_its_values(folder, values, whys):
    text = compose(values, whys, OPTIONS)
    assert read(text) == kept(values)
    assert tomllib.loads(text)["strategy_options"] == OPTIONS
    assert edit(text, kept(values), whys, OPTIONS) == text  # written again, nothing changes


def test_lines_that_are_commented_out_read_as_settings_once_uncommented():
    for name in KNOWN:
        line = unset(name).removeprefix("# ")
        assert checked(KNOWN[name], tomllib.loads(line)[name], "") is not None
        assert f"\n{unset(name)}\n" in compose({}, {}, {})


def test_options_of_another_file_join_those_of_the_same_strategy():
    text = 'strategy = "fsdp"\n[strategy_options]\nreshard_after_forward = false  # fast\nsize = 1\n'
    edited = edit(text, {"strategy": "fsdp"}, {}, {"cpu_offload": True, "size": 2})
    assert tomllib.loads(edited)["strategy_options"] == {
        "reshard_after_forward": False,
        "size": 2,
        "cpu_offload": True,
    }
    assert "# fast" in edited
    edited = edit(text, {"strategy": "tensor_parallel"}, {}, {"size": 2})
    assert tomllib.loads(edited)["strategy_options"] == {"size": 2}


# -- files that people wrote -------------------------------------------------------------------------------------------

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
    "[launch]\n",
    "# strategy = \"fsdp\" was slower\n# seed = 3\nstrategy = 'ddp'\n# [launch]\n",
    "memory = '16GiB'\n# x\n[launch]\nmain_address = 'a#b' # a hash in a string\n",
    "[strategy_options]\nx = 1 # of mine\n[launch]\nprocesses = 1\n",
]
WISHES = [
    {"seed": 2},
    {"strategy": "fsdp", "processes": 4},
    {"processes": None, "nodes": None},
    {"seed": None, "strategy": None, "project_dir": None},
    {"nodes": "2", "main_address": 'a "quoted" \\ name # é'},
    {"project_dir": "runs", "memory": 16 << 30, "main_port": 29500},
]


@pytest.mark.parametrize("before", WRITTEN)
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_other_keys_and_comments_stay(before, ending, folder):
    before = before.replace("\n", ending)
    found = read(before)
    comments = re.findall(r"# [^'\"#\r\n]+$", before, re.M)
    for wish in WISHES:
        after = edit(before, wish, dict.fromkeys(wish, "a reason"))
        assert read(after) == kept({**found, **wish})
        assert all(comment in after for comment in comments), after
        assert ending == "\n" or ending not in before or "\n" not in after.replace("\r\n", "")
        assert edit(after, wish, dict.fromkeys(wish, "another reason")) == after
        assert read(edit(after, {name: found.get(name) for name in wish}, {})) == found


def test_our_reason_goes_with_its_value_and_a_value_takes_the_place_of_its_default():
    text = compose({"strategy": "ddp"}, {"strategy": "two processes"}, {})
    after = edit(text, {"strategy": "fsdp", "debug": True, "processes": 2}, {"strategy": "less memory"})
    assert after == text.replace('"ddp"  # here: two processes', '"fsdp"  # here: less memory').replace(
        "# debug = false  # an example", "debug = true"
    ).replace("# processes = 1  # an example", "processes = 2")
    assert edit(after, {"strategy": None}, {}).count('# strategy = "auto"\n') == 1


def test_a_way_to_write_that_is_unforeseen_is_left_alone(monkeypatch):
    import tomlkit

    monkeypatch.setattr(tomlkit, "dumps", lambda document: "seed = 1\n")
    with pytest.raises(SettingError, match="cannot be edited from here; by hand, write seed = 2"):
        edit("seed = 1\n", {"seed": 2}, {})


# -- an existing file --------------------------------------------------------------------------------------------------

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
    assert "What changes in easymp.toml\n--- easymp.toml\n+++ easymp.toml (new)\n@@ " in said
    assert '\n-mixed_precision = "fp16"\n+mixed_precision = "bf16"' in said
    assert "\n # the paper's settings\n seed = 17   # as in table 3\n" in said
    assert "The one before is easymp.toml.bak" in said and Path("easymp.toml.bak").read_text() == BY_HAND
    assert resolve() == resolve(seed=17, mixed_precision="bf16", project_dir="runs")
    assert resolve_launching() == Launching(processes=2)


def test_backups_are_not_overwritten_and_a_file_that_says_so_already_stays(config):
    texts = []
    for seed in ("1", "2", "3", "3"):
        said = config("T4", "--yes", "--set", f"seed={seed}")
        texts.append(FILE.read_text())
    assert "says so already" in said
    assert sorted(path.name for path in Path().iterdir()) == [
        "easymp.toml",
        "easymp.toml.bak",
        "easymp.toml.bak.1",
    ]
    assert [Path("easymp.toml.bak").read_text(), Path("easymp.toml.bak.1").read_text()] == texts[:2]


def test_what_an_existing_file_asks_for_and_is_impossible(config, talk):
    FILE.write_text("mixed_precision = 'fp8'\nstrategy = 'ddp'\n")
    said = config("laptop CPU", "--yes", code=1)
    assert "easymp.toml: mixed_precision = fp8 cannot run here" in said
    assert "or pass --set mixed_precision=auto" in said
    assert "easymp.toml: mixed_precision = fp8 cannot run here" in talk("laptop CPU", "2")
    assert (resolve().mixed_precision, resolve().strategy) == ("auto", "ddp")
    talk("laptop CPU", "1")  # strategy is not asked about then, but not left wrong either
    assert resolve().strategy == "auto"


SETTING = ("# x\nsede = 1\n", "easymp.toml, line 2: 'sede' is no setting, did you mean 'seed'?")
LAUNCHING = (
    "[launch]\nproceses = 1\n",
    "line 2: 'proceses' is no setting of [launch], did you mean 'processes'?",
)


@pytest.mark.parametrize(
    ("command", "text", "words"),
    [
        (["config", "--yes"], *SETTING),
        (["env"], *SETTING),
        (["config", "--yes"], *LAUNCHING),  # env does not read [launch]
    ],
)
def test_wrong_keys_are_named_with_their_line(command, text, words, folder, capsys):
    from easymp.cli import main

    FILE.write_text(text)
    assert main(command) == 1
    assert words in capsys.readouterr().err


# -- the disk ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere/easymp.toml", "there is no folder .*nowhere for nowhere/easymp.toml: make it first"),
        ("file/easymp.toml", "there is no folder .*file for file/easymp.toml"),
        (".", r"\. is a folder: name a file by --file, such as easymp.toml"),
        ("/proc/easymp.toml", "/proc/easymp.toml cannot be written: "),
        (os.devnull, "is no ordinary file, and would be replaced by one"),
    ],
)
def test_a_place_that_cannot_be_written_is_said_before_anything_is_asked(path, words, talk):
    Path("file").touch()
    said = talk("T4", words=f"--file {path}", code=1)
    assert re.search(f"easymp: .*{words}", said) and "What is here" not in said


def test_a_read_only_folder(folder: Path):
    place = folder / "closed"
    place.mkdir()
    place.chmod(0o555)
    if os.geteuid() == 0:  # root may write everywhere: be another user for a moment
        for above in (folder, *folder.parents):
            if not above.stat().st_mode & 0o001:
                above.chmod(above.stat().st_mode | 0o011)
        os.seteuid(65534)
    try:
        with pytest.raises(SettingError, match=r"closed/easymp.toml cannot be written: Permission denied"):
            target(place / "easymp.toml")
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
    assert not any(place.iterdir())


def _full(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


def _change(monkeypatch: pytest.MonkeyPatch) -> None:
    FILE.write_text("seed = 3\n")


@pytest.mark.parametrize(
    ("trouble", "words", "left"),
    [
        (lambda patch: patch.setattr(os, "fsync", _full), "cannot be written: No space left", "seed = 1\n"),
        (_change, "was changed meanwhile and is left as it is", "seed = 3\n"),
    ],
)
def test_a_write_that_fails_leaves_the_file_as_it_was(
    trouble: Callable[[pytest.MonkeyPatch], None], words, left, folder, monkeypatch
):
    FILE.write_text("seed = 1\n")
    there = target(FILE)
    trouble(monkeypatch)
    with pytest.raises(SettingError, match=words):
        write(there, "seed = 2\n")
    assert FILE.read_text() == left
    assert [path.name for path in Path().iterdir()] == ["easymp.toml"]


def test_links_modes_and_owners_stay(folder):
    Path("shared").mkdir()
    real = Path("shared/settings.toml")
    real.write_text("seed = 1\n")
    real.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(real, 65534, 65534)
    before = real.stat()
    FILE.symlink_to(real)
    kept = write(target(FILE), "seed = 2\n")
    assert kept == (real.parent / "settings.toml.bak").resolve() and FILE.is_symlink()
    assert FILE.read_text() == "seed = 2\n"
    for path in (real, kept):
        found = path.stat()
        assert (found.st_mode, found.st_uid, found.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
