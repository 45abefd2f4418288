"""The file: what is written reads as what was answered, and what people wrote stays."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from easymp import settings
from easymp.cli.wizard import read_ahead
from easymp.cli.wizard.case import KNOWN
from easymp.cli.wizard.editing import edit
from easymp.cli.wizard.toml import block, compose, unset
from easymp.cli.wizard.writing import target, write
from easymp.errors import RefusedError, SettingError
from easymp.settings import (
    LAUNCHING,
    NAMES,
    Launching,
    Settings,
    checked,
    resolve,
    resolve_launching,
    written,
)

from .screens import talk

FILE = Path("easymp.toml")


# -- as answered -------------------------------------------------------------------------------------------------------


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
    st.sampled_from(sorted(KNOWN)),
    st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"])),
    max_size=4,
)


def read(text: str) -> dict[str, object]:
    FILE.write_bytes(text.encode())
    return written(settings.read(FILE))


def kept(values: dict[str, object]) -> dict[str, object]:
    return {name: checked(KNOWN[name], value, "") for name, value in values.items() if value is not None}


@hypothesis_settings(max_examples=25, deadline=None)
@given(VALUES, WHYS)
def test_a_new_file_reads_as_its_values(values: dict[str, object], whys: dict[str, str]) -> None:
    text = compose(values, whys)
    found = kept(values)
    assert read(text) == found
    assert resolve() == Settings(**{name: value for name, value in found.items() if name in NAMES})
    assert resolve_launching() == Launching(
        **{name: value for name, value in found.items() if name in LAUNCHING}
    )
    assert edit(text, found, whys) == text  # written again, nothing changes


def test_lines_that_are_commented_out_read_as_settings_once_uncommented() -> None:
    for name in KNOWN:
        line = unset(name).removeprefix("# ")
        assert checked(KNOWN[name], tomllib.loads(line)[name], "") is not None
        assert unset(name) in compose({}, {})
    assert resolve_launching() == Launching()


# -- as people write ---------------------------------------------------------------------------------------------------

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
    "[launch]\nprocesses = 2 # two\n",
    '[launch]\n# strategy = "auto"\nprocesses = 2 # in the wrong place above\n',
    "# top\nseed = 1\n\n# of the table\n[launch] # header\n# of processes\nprocesses = 2\n\n# the end\n",
    "seed = 1\n[ launch ]\n\"processes\" = 2\nnodes = '1:2' # elastic",
    "launch.processes = 2 # dotted\nseed = 1\n",
    "launch = { processes = 2, nodes = '1:4' } # inline\nseed = 1 # last\n",
    "launch={}\n",
    "[launch]\n",
    "# strategy = \"fsdp\" was slower\n# seed = 3\nstrategy = 'ddp'\n# [launch]\n",
    "memory = '16GiB'\n# x\n[launch]\nmain_address = 'a#b' # a hash in a string\n",
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
def test_other_keys_and_comments_stay(before: str, ending: str) -> None:
    before = before.replace("\n", ending)
    found = read(before)
    comments = re.findall(r"# [^'\"#\r\n]+$", before, re.M)
    for wish in WISHES:
        after = edit(before, wish, dict.fromkeys(wish, "a reason"))
        assert read(after) == kept({**found, **wish})
        assert all(comment in after for comment in comments), after
        assert ending not in before or ending == "\n" or "\n" not in after.replace("\r\n", "")
        assert edit(after, wish, dict.fromkeys(wish, "another reason")) == after
        back = {name: found.get(name) for name in wish}
        assert read(edit(after, back, {})) == found


def test_what_is_so_already_stays_as_it_is_written() -> None:
    for before in WRITTEN:
        assert edit(before, read(before), {}) == before or not before.endswith("\n")


def test_our_reason_goes_with_its_value() -> None:
    before = "\n".join(
        [
            *block("seed", 1, "a reason that is too long for one line, " * 4),
            "",
            "# by hand",
            "debug = true",
            "",
        ]
    )
    after = edit(
        before, {"seed": 2, "debug": False}, {"seed": "shorter", "debug": "no comment of ours was there"}
    )
    assert after == "# Seed of all random streams\n# Here: shorter\nseed = 2\n\n# by hand\ndebug = false\n"
    assert (
        edit(before, {"seed": None}, {})
        == "# Seed of all random streams\n# seed = 0  # an example\n\n# by hand\ndebug = true\n"
    )


def test_a_setting_takes_the_place_of_the_line_that_showed_its_default() -> None:
    text = compose({"strategy": "ddp"}, {})
    after = edit(text, {"debug": True, "processes": 2}, {"processes": "two"})
    assert after == text.replace("# debug = false  # an example", "debug = true").replace(
        "# processes = 1  # an example", "# Here: two\nprocesses = 2"
    )


def test_a_way_to_write_that_is_unforeseen_is_left_alone() -> None:
    before = "launch = { processes = 2 }\n"
    with pytest.raises(SettingError, match="cannot be edited from here; by hand, set nodes = "):
        edit(before.replace(" = {", "\t=\t{").replace("launch", '"l\\u0061unch"'), {"nodes": "3"}, {})


# -- an existing file --------------------------------------------------------------------------------------------------

BY_HAND = """\
# the paper's settings
seed = 17   # as in table 3
mixed_precision = "fp16"

[launch]
processes = 2
"""


def test_an_existing_file_gives_the_defaults_and_is_kept() -> None:
    FILE.write_text(BY_HAND)
    script = talk("2xA100 NVLink", by_name={"mixed_precision": "bf16", "project_dir": "runs"})
    assert script.prompts[0] == "processes [2]: "
    assert "mixed_precision [fp16]: " in script.prompts
    difference = script.told[script.told.index("What changes in easymp.toml") + 1]
    assert difference.startswith("--- easymp.toml\n+++ easymp.toml (new)\n@@ ")
    assert '\n-mixed_precision = "fp16"\n+mixed_precision = "bf16"\n' in difference
    assert "\n # the paper's settings\n seed = 17   # as in table 3\n" in difference
    assert Path("easymp.toml.bak").read_text() == BY_HAND
    assert resolve() == resolve(seed=17, mixed_precision="bf16", project_dir="runs")
    assert resolve_launching() == Launching(processes=2)


def test_backups_are_not_overwritten() -> None:
    texts = []
    for seed in ("1", "2", "3"):
        talk("T4", yes=True, ahead=read_ahead([f"seed={seed}"]))
        texts.append(FILE.read_text())
    assert sorted(path.name for path in Path().iterdir()) == [
        "easymp.toml",
        "easymp.toml.bak",
        "easymp.toml.bak.1",
    ]
    assert [Path("easymp.toml.bak").read_text(), Path("easymp.toml.bak.1").read_text()] == texts[:2]


def test_a_file_that_says_so_already_stays() -> None:
    talk("8xH100", by_name={"strategy": "fsdp"})
    before = FILE.stat()
    script = talk("8xH100", by_name={})
    assert script.told.count("easymp.toml says so already, and stays as it is.") == 1
    assert not any(prompt.startswith("yes, no") for prompt in script.prompts)
    assert (FILE.stat().st_ino, [*Path().iterdir()]) == (before.st_ino, [FILE])


def test_what_an_existing_file_asks_for_and_cannot_be_had_here() -> None:
    FILE.write_text("mixed_precision = 'fp8'\nstrategy = 'ddp'\n")
    with pytest.raises(
        RefusedError,
        match=r"easymp.toml: mixed_precision = fp8 cannot run here: .*; or pass --set mixed_precision=auto",
    ):
        talk("laptop CPU", yes=True)
    script = talk("laptop CPU", by_name={"processes": "2"})
    assert "easymp.toml: mixed_precision = fp8 cannot run here" in script.heard
    assert (resolve().mixed_precision, resolve().strategy) == ("auto", "ddp")
    script = talk("laptop CPU", by_name={"processes": "1"})  # not asked about then, but not left wrong either
    assert (
        "strategy = ddp cannot run here: strategy 'ddp' averages gradients over processes, and there is one"
        in script.heard
    )
    assert resolve().strategy == "auto"


def test_wrong_keys_are_named_with_their_line() -> None:
    FILE.write_text("# x\nsede = 1\n")
    with pytest.raises(
        SettingError, match=r"easymp.toml, line 2: 'sede' is no setting, did you mean 'seed'\?"
    ):
        talk("T4", yes=True)
    FILE.write_text("seed = 1\n[launch]\nproceses = 1\n")
    with pytest.raises(
        SettingError, match=r"line 3: 'proceses' is no setting of \[launch\], did you mean 'processes'\?"
    ):
        talk("T4", yes=True)


# -- on the disk -------------------------------------------------------------------------------------------------------


def test_dry_run_writes_nothing() -> None:
    script = talk("8xH100", by_name={"strategy": "fsdp"}, dry_run=True)
    assert '\nstrategy = "fsdp"\n' in script.heard
    assert "Nothing is written, as --dry-run asks" in script.heard
    assert not any(Path().iterdir())


def test_a_file_elsewhere_is_named_in_the_next_command(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("some where").mkdir()
    script = talk("8xH100", by_name={}, path="some where/my.toml")
    assert script.told[-1] == "  EASYMP_CONFIG='some where/my.toml' easymp launch train.py"
    monkeypatch.setenv("EASYMP_CONFIG", "other.toml")  # not there yet
    script = talk("T4", yes=True)
    assert Path("other.toml").exists()
    assert script.told[-1] == "  python train.py"


def test_next_commands_on_several_nodes() -> None:
    assert talk("A100", by_name={}, nodes=2).told[-1] == "  srun easymp launch train.py"
    script = talk("8xH100", by_name={"nodes": "2:4"}, path="easymp.toml")
    assert script.told[-2:] == [
        "On each of the 2 to 4 machines, of which this one is the first:",
        "  easymp launch --main-address gpu1 train.py",
    ]
    script = talk("8xH100", by_name={}, path="easymp.toml", ahead={"main_address": "gpu7"})
    assert script.told[-1] == "  easymp launch train.py"


def test_a_variable_that_wins_over_the_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EASYMP_MIXED_PRECISION", "fp32")
    assert "EASYMP_MIXED_PRECISION in the environment wins over the file." in talk("T4", by_name={}).told


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere/easymp.toml", "there is no folder .*nowhere for nowhere/easymp.toml: make it first"),
        ("file/easymp.toml", "there is no folder .*file for file/easymp.toml"),
        (".", r"\. is a folder: name a file by --file, such as easymp.toml"),
        ("/proc/easymp.toml", "/proc/easymp.toml cannot be written: "),
        (os.devnull, "is no ordinary file, and would be replaced by one: name another by --file"),
    ],
)
def test_a_place_that_cannot_be_written_is_said_before_anything_is_asked(path: str, words: str) -> None:
    Path("file").touch()
    with pytest.raises(SettingError, match=words):
        talk("T4", path=path)  # without answers


def test_a_read_only_folder(folder: Path) -> None:
    place = folder / "closed"
    place.mkdir()
    place.chmod(0o555)
    if os.geteuid() == 0:  # who may write everywhere: be somebody else for a moment
        for above in (folder, *folder.parents):
            if not above.stat().st_mode & 0o001:
                above.chmod(above.stat().st_mode | 0o011)
        os.seteuid(65534)
    try:
        with pytest.raises(SettingError, match=r"closed/easymp.toml cannot be written: Permission denied"):
            talk("T4", path=str(place / "easymp.toml"))
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
    assert not any(place.iterdir())


def test_a_write_that_fails_leaves_the_file_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    FILE.write_text("seed = 1\n")
    there = target(FILE)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SettingError, match=r"easymp\.toml cannot be written: No space left on device"):
        write(there, "seed = 2\n")
    assert FILE.read_text() == "seed = 1\n"
    assert [path.name for path in Path().iterdir()] == ["easymp.toml"]


def test_a_file_that_changed_meanwhile_is_left_alone() -> None:
    FILE.write_text("seed = 1\n")
    there = target(FILE)
    FILE.write_text("seed = 3\n")
    with pytest.raises(
        SettingError, match=r"easymp\.toml was changed meanwhile and is left as it is: run the command again"
    ):
        write(there, "seed = 2\n")
    assert [path.name for path in Path().iterdir()] == ["easymp.toml"]


def test_a_file_stays_its_owners() -> None:
    FILE.write_text("seed = 1\n")
    if os.geteuid() == 0:  # who alone gives files away
        os.chown(FILE, 65534, 65534)
    owner = FILE.stat().st_uid, FILE.stat().st_gid
    write(target(FILE), "seed = 2\n")
    assert [(path.stat().st_uid, path.stat().st_gid) for path in (FILE, Path("easymp.toml.bak"))] == [
        owner
    ] * 2


def test_links_and_modes_stay() -> None:
    Path("shared").mkdir()
    real = Path("shared/settings.toml")
    real.write_text("seed = 1\n")
    real.chmod(0o640)
    FILE.symlink_to(real)
    assert write(target(FILE), "seed = 2\n") == (real.parent / "settings.toml.bak").resolve()
    assert FILE.is_symlink()
    assert (FILE.read_text(), real.stat().st_mode & 0o777) == ("seed = 2\n", 0o640)
    assert (real.parent / "settings.toml.bak").stat().st_mode & 0o777 == 0o640
