"""Which questions are asked on which machine, what is proposed there, and what an answer is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from easymp.cli.wizard import QuitError, case, read_ahead
from easymp.cli.wizard.looking import facts
from easymp.cli.wizard.measuring import Measurement, Speed
from easymp.cli.wizard.questions import PRECISION, QUESTIONS, STRATEGY
from easymp.distributed import Ranks
from easymp.errors import RefusedError, SettingError
from easymp.launcher.rendezvous import read_nodes
from easymp.plan import make_plan
from easymp.precision import PRECISIONS
from easymp.settings import NAMES, Launching, Settings, resolve, resolve_launching
from easymp.strategies import STRATEGIES

from ..hardware.machines import MACHINES
from .screens import machine, talk

ALWAYS = ["gradient_accumulation_steps", "project_dir"]
ONE_DEVICE = ["mixed_precision", *ALWAYS]
CPU = ["processes", "mixed_precision", *ALWAYS]
SEVERAL = ["processes", "nodes", "mixed_precision", "strategy", *ALWAYS]

# machine: what is asked where all defaults are taken; the precision and the processes proposed
ASKED = {
    "P100": (ONE_DEVICE, "fp32", "1"),
    "V100": (ONE_DEVICE, "fp16", "1"),
    "T4": (ONE_DEVICE, "fp16", "1"),
    "GTX 1660": (ALWAYS, "fp32", "1"),  # nothing but fp32 runs there
    "A100": (ONE_DEVICE, "bf16", "1"),
    "2xA100 NVLink": (SEVERAL, "bf16", "2"),
    "2xRTX 3090": (SEVERAL, "bf16", "2"),
    "L4": (ONE_DEVICE, "bf16", "1"),
    "H100": (ONE_DEVICE, "bf16", "1"),
    "8xH100": (SEVERAL, "bf16", "8"),
    "B200": (ONE_DEVICE, "bf16", "1"),
    "RTX 5090": (ONE_DEVICE, "bf16", "1"),
    "MI300X": (ONE_DEVICE, "bf16", "1"),
    "Intel XPU": (ONE_DEVICE, "bf16", "1"),
    "M-series Mac": (ONE_DEVICE, "fp32", "1"),
    "laptop CPU": (CPU, "fp32", "1"),
    "Zen 4 server": (CPU, "auto", "1"),
    "Sapphire Rapids": (CPU, "auto", "1"),
    "Graviton 4": (CPU, "auto", "1"),
}


@pytest.mark.parametrize("name", MACHINES)
def test_only_what_changes_anything_here_is_asked(name: str) -> None:
    asked, precision, processes = ASKED[name]
    script = talk(name, by_name={})
    assert script.asked == asked
    assert any(re.match(rf"precision {precision} \(\S", line) for line in script.told)
    assert any(line.startswith(f"processes {processes} ") for line in script.told)
    assert resolve_launching() == Launching()
    assert (resolve().mixed_precision, resolve().strategy) == ("auto", "auto")


@pytest.mark.parametrize("name", ["GTX 1660", "laptop CPU", "8xH100"])
def test_all_are_asked_where_that_is_wanted(name: str) -> None:
    assert talk(name, by_name={}, everything=True).asked == [question.name for question in QUESTIONS]


def test_six_questions_at_most() -> None:
    assert len(QUESTIONS) == 6


def test_nodes_are_asked_about_where_they_were_announced() -> None:
    script = talk("A100", by_name={}, nodes=2)
    assert script.asked == ["nodes", "mixed_precision", "strategy", *ALWAYS]
    assert "Here: auto is 2 (SLURM_JOB_NUM_NODES in the environment)." in script.told


def test_a_strategy_is_asked_about_where_there_are_several_processes() -> None:
    assert talk("laptop CPU", by_name={"processes": "2"}).asked == [*CPU[:2], "strategy", *ALWAYS]
    assert Path("easymp.toml").read_text().count("\nprocesses = 2\n") == 1


def test_each_word_has_its_meaning() -> None:
    assert [*PRECISION] == ["auto", *PRECISIONS]
    assert [*STRATEGY] == ["auto", *STRATEGIES]


def test_what_was_found() -> None:
    rows = facts(machine("8xH100"))
    assert rows[:8] == [
        ["cuda:0-7", "8 x NVIDIA H100 80GB HBM3"],
        ["memory", "79.1 GiB each"],
        ["capability", "9.0 (sm_90)"],
        ["bf16", "yes"],
        ["fp16", "yes"],
        ["fp8", "yes"],
        ["TF32", "yes"],
        ["links", "NVLink"],
    ]
    assert rows[-1] == ["nodes", "1 (nothing announced others)"]
    rows = facts(machine("T4", nodes=2))
    assert rows[0] == ["cuda:0", "Tesla T4"]
    assert ["bf16", "no units for it"] in rows
    assert rows[-1] == ["nodes", "2 (SLURM_JOB_NUM_NODES in the environment)"]
    rows = facts(machine("laptop CPU"))
    assert rows[0] == ["no GPU", "no NVIDIA GPU: this torch 2.13.0+cpu is built without CUDA"]
    assert ["bf16", "no instructions for it"] in rows
    assert facts(machine("M-series Mac"))[0] == ["mps", "Apple M3 Max GPU"]


# -- wrong answers -----------------------------------------------------------------------------------------------------

WRONG = [
    ("T4", "mixed_precision", "bf61", "'bf61' is not one of auto, .* did you mean 'bf16'?"),
    (
        "T4",
        "mixed_precision",
        "bf16",
        "Tesla T4 (sm_75) has no bf16 units; torch would emulate them; use fp16, fp32 or auto.",
    ),
    ("laptop CPU", "mixed_precision", "fp8", "fp8 needs .*, and training runs on the CPU; use bf16"),
    (
        "2xRTX 3090",
        "processes",
        "3",
        "has 2 NVIDIA GeForce RTX 3090: two processes on one device .* Start at most 2 here",
    ),
    ("2xRTX 3090", "processes", "0", "0 is below the smallest possible value, 1."),
    ("2xRTX 3090", "processes", "two", "'two' is not a whole number."),
    ("2xRTX 3090", "nodes", "0", "nodes='0' is no number of nodes: use 2, or 1:4"),
    ("2xRTX 3090", "nodes", "4:2", "nodes='4:2' is no number of nodes: use 2, or 1:4"),
    ("2xRTX 3090", "nodes", "many", "nodes='many' is no number of nodes"),
    (
        "2xRTX 3090",
        "strategy",
        "single",
        "'single' is for one process, and 2 were started.*; use strategy='ddp'",
    ),
    ("2xRTX 3090", "strategy", "fsdb", "did you mean 'fsdp'?"),
    ("laptop CPU", "gradient_accumulation_steps", "0", "0 is below the smallest possible value, 1."),
    ("laptop CPU", "gradient_accumulation_steps", "1.5", "'1.5' is not a whole number."),
    ("laptop CPU", "project_dir", "file/runs", "'file' is a file, so there can be no folder file/runs"),
    ("laptop CPU", "project_dir", "s4://bucket", "fsspec knows no protocol 's4'"),
    ("laptop CPU", "project_dir", "a\x1b[2Jb", r"'a\x1b[2Jb' holds characters that no terminal shows"),
]


@pytest.mark.parametrize(("name", "setting", "answer", "words"), WRONG)
def test_a_wrong_answer_is_told_why_and_asked_again(name: str, setting: str, answer: str, words: str) -> None:
    Path("file").touch()
    number = ASKED[name][0].index(setting)
    script = talk(name, *[""] * number, answer, *[""] * 8)
    assert script.asked.count(setting) == 2
    pattern = ".*".join(map(re.escape, words.split(".*")))
    assert any(re.search(pattern, line) for line in script.told), script.heard
    assert resolve() == resolve(mixed_precision="auto")  # as without that answer


def test_an_answer_has_to_fit_the_ones_before() -> None:
    script = talk("2xA100 NVLink", "", "", "O2", "pipeline", "fsdp", "", "", "")
    assert "precision O2 and strategy pipeline do not go together: " in script.heard
    assert resolve().strategy == "fsdp"
    script = talk(
        "2xRTX 3090", "1", "1:2", "", "ddp", "", "", "", "", path="elastic.toml"
    )  # alone on one node at first
    assert "'ddp' averages gradients over processes, and there is one" in script.heard


def test_what_is_possible_and_slow_is_said() -> None:
    assert (
        "This CPU has no bf16 instructions, so it is slower than fp32."
        in talk("laptop CPU", "", "bf16", *[""] * 3).told
    )
    assert (
        "On one node it needs strategy_options=HSDP"
        in talk("8xH100", by_name={"strategy": "hsdp"}, path="h").heard
    )
    assert (
        "99 processes take turns on 8 thread(s): slower than 8 would be."
        in talk("laptop CPU", "99", *[""] * 5, path="b").told
    )


def test_help_says_what_each_word_means_and_why_some_cannot_be_had() -> None:
    script = talk("T4", "help", "?", *[""] * 4)
    assert script.told.count("fp16 half the bits with more digits and less range: the loss is scaled") == 2
    assert (
        "bf16 not here: Tesla T4 (sm_75) has no bf16 units; torch would emulate them; use fp16, fp32 or auto"
        in script.told
    )


# -- back and quit -----------------------------------------------------------------------------------------------------


def test_back_asks_again_with_the_answer_that_was_given() -> None:
    script = talk("8xH100", "4", "BACK", "", "2", "fp16", "back", "back", "", "bf16", *[""] * 4)
    assert script.prompts[:9] == [
        "processes [auto]: ",
        "nodes [auto]: ",
        "processes [4]: ",
        "nodes [auto]: ",
        "mixed_precision [auto]: ",
        "strategy [auto]: ",
        "mixed_precision [fp16]: ",
        "nodes [2]: ",
        "mixed_precision [fp16]: ",
    ]
    assert (resolve().mixed_precision, resolve_launching()) == ("bf16", Launching(processes=4, nodes="2"))


def test_back_at_the_first_and_from_the_last() -> None:
    script = talk("T4", "back", "fp32", "2", "runs", "back", "logs", "yes")
    assert "This is the first question." in script.told
    assert (resolve().mixed_precision, resolve().project_dir) == ("fp32", "logs")


def test_a_strategy_is_forgotten_with_the_processes_that_needed_it() -> None:
    talk("laptop CPU", "2", "", "ddp", "back", "back", "back", "1", *[""] * 5)
    assert resolve_launching() == Launching(processes=1)
    assert resolve().strategy == "auto"


@pytest.mark.parametrize("number", range(7))
@pytest.mark.parametrize("word", ["quit", "Quit", None])
def test_quit_at_each_question_writes_nothing(number: int, word: str | None) -> None:
    with pytest.raises(QuitError):
        talk("8xH100", *[""] * number, *([word] if word else []))
    assert not any(Path().iterdir())


def test_no_at_the_end_writes_nothing() -> None:
    with pytest.raises(QuitError):
        talk("T4", "", "", "", "maybe", "no")
    assert not any(Path().iterdir())


# -- answered ahead ----------------------------------------------------------------------------------------------------


def test_what_was_answered_ahead_is_not_asked() -> None:
    script = talk(
        "8xH100", by_name={}, ahead=read_ahead(["strategy=fsdp", "processes=4", "seed=7", "memory=60GiB"])
    )
    assert script.asked == ["nodes", "mixed_precision", *ALWAYS]
    assert resolve() == resolve(strategy="fsdp", seed=7, memory="60GiB")
    assert resolve_launching() == Launching(processes=4)


def test_an_answer_ahead_that_cannot_be_had_is_asked_again_or_refused() -> None:
    ahead = read_ahead(["mixed_precision=bf16"])
    script = talk("T4", by_name={}, ahead=ahead)
    assert "--set: mixed_precision = bf16 cannot run here: Tesla T4 (sm_75) has no bf16 units" in script.heard
    assert "mixed_precision" in script.asked
    with pytest.raises(
        RefusedError,
        match=r"--set: mixed_precision = bf16 cannot run here: .*; or pass --set mixed_precision=auto",
    ):
        talk("T4", ahead=ahead, yes=True, path="b.toml")
    assert not Path("b.toml").exists()


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (
            "precision=bf16",
            r"'precision' is no setting, did you mean 'mixed_precision'\? Known: mixed_precision, .*max_restarts",
        ),
        ("seed", "there is no value; write --set seed=VALUE"),
        ("seed=x", r"^--set seed=x: 'x' is not a whole number"),
        ("nodes=x", r"^--set nodes=x: nodes='x' is no number of nodes"),
        ("=", r"'' is no setting\. Known"),
    ],
)
def test_a_wrong_answer_ahead(pair: str, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        read_ahead([pair])


# -- measured, and taken over ------------------------------------------------------------------------------------------


def measurement(*ratios: float) -> Measurement:
    speeds = [
        Speed(name, ratio, (ratio, ratio), {}, 9, 64) for name, ratio in zip(("fp32", "bf16", "fp16"), ratios)
    ]
    return Measurement("cpu", tuple(speeds), {"tf32": "it is not there"}, 10.0)


def test_a_measurement_is_an_answer_to_the_question_of_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        case, "measure", lambda hardware, cpu: calls.append((hardware, cpu)) or measurement(1, 2.1, 0.5)
    )
    script = talk("8xH100", "4", "", "Measure", "back", "back", "", "", "", *[""] * 4)
    assert calls == [(MACHINES["8xH100"], False)]
    assert any(line.startswith("bf16 is 2.1 times as fast as fp32 on this machine") for line in script.told)
    reason = "timed here: bf16 is 2.1 times as fast as fp32 on this machine"
    assert script.heard.count(f"needed); {reason}.") == 1  # asked again after going back
    assert re.search(rf"Here: auto is bf16 .*{reason}", Path("easymp.toml").read_text().replace("\n#  ", ""))
    monkeypatch.setattr(
        case, "measure", lambda hardware, cpu: calls.append((hardware, cpu)) or measurement(1, 0.5, 0.2)
    )
    script = talk("A100", yes=True, measure=True, ahead={"cpu": True}, path="cpu.toml")
    assert calls[1:] == [(MACHINES["A100"], True)]
    assert (
        "timed here: bf16 takes 2 times as long as fp32 on this machine; fp16 takes 5"
        in script.heard.replace("\n#  ", "")
    )


def test_a_device_that_torch_cannot_use_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(hardware: object, cpu: bool) -> Measurement:
        raise RuntimeError("CUDA error: no kernel image")

    monkeypatch.setattr(case, "measure", broken)
    script = talk("T4", "measure", "", "", "", "")
    assert "They could not be timed: CUDA error: no kernel image" in script.told
    assert resolve().mixed_precision == "auto"


def test_only_precision_can_be_measured() -> None:
    assert "'measure' is not a whole number." in talk("laptop CPU", "measure", *[""] * 5).told


def test_a_configuration_of_a_peer_gives_the_defaults() -> None:
    Path("ds.json").write_text(
        '{"fp16": {"enabled": true, "hysteresis": 2}, "zero_optimization": {"stage": 2}, "nonsense": 1}'
    )
    Path("easymp.toml").write_text("mixed_precision = 'bf16'\ngradient_accumulation_steps = 4\nseed = 3\n")
    script = talk("2xA100 NVLink", by_name={}, foreign="ds.json", ahead=read_ahead(["project_dir=runs"]))
    assert "mixed_precision [fp16]: " in script.prompts
    assert "strategy [fsdp]: " in script.prompts
    assert "gradient_accumulation_steps [4]: " in script.prompts
    assert resolve() == resolve(
        mixed_precision="fp16", strategy="fsdp", gradient_accumulation_steps=4, seed=3, project_dir="runs"
    )
    told = script.told
    assert "What becomes of ds.json (DeepSpeed)" in told
    assert re.search("unknown, nothing taken: .*no 'nonsense'", told[told.index("nonsense: 1") + 1])
    assert "hysteresis=2" in told[told.index("In the script") + 1]


def test_what_a_peer_asks_for_and_cannot_be_had_here() -> None:
    Path("ds.json").write_text('{"bf16": {"enabled": true}}')
    with pytest.raises(
        RefusedError,
        match=r"ds.json: mixed_precision = bf16 cannot run here: .*; or pass --set mixed_precision=auto",
    ):
        talk("T4", yes=True, foreign="ds.json")
    script = talk("T4", by_name={}, foreign="ds.json")
    assert "ds.json: mixed_precision = bf16 cannot run here" in script.heard
    assert resolve().mixed_precision == "auto"


# -- whatever is answered ----------------------------------------------------------------------------------------------

ANSWERS = st.fixed_dictionaries(
    {},
    optional={
        "processes": st.sampled_from(["auto", "1", "2", "7", "8"]),
        "nodes": st.sampled_from(["auto", "1", "2", "1:2", "3:9"]),
        "mixed_precision": st.sampled_from([*PRECISION, "half", "O2"]),
        "strategy": st.sampled_from([*STRATEGY]),
        "gradient_accumulation_steps": st.integers(1, 99).map(str),
        "project_dir": st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=9).map(
            "runs/".__add__
        ),
    },
)


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.sampled_from([*MACHINES]), ANSWERS, st.booleans())
def test_the_file_reads_as_what_was_answered(name: str, answers: dict[str, str], everything: bool) -> None:
    Path("easymp.toml").unlink(missing_ok=True)
    script = talk(name, by_name=dict(answers), everything=everything)
    expected = {}
    for question in QUESTIONS:
        if (
            question.name in answers and script.asked.count(question.name) == 1
        ):  # not asked again: it was taken
            expected[question.name] = question.read(question, answers[question.name])
    ours = {key: value for key, value in expected.items() if key in NAMES}
    assert resolve() == Settings(**ours)
    assert resolve_launching() == Launching(
        **{key: value for key, value in expected.items() if key not in NAMES}
    )
    ranks = Ranks(local_size=resolve_launching().processes or max(1, len(MACHINES[name].devices)))
    assert make_plan(resolve(), MACHINES[name], ranks._replace(size=ranks.local_size * _most(expected)))


def _most(expected: dict[str, object]) -> int:
    return read_nodes(str(expected.get("nodes") or "1"))[1]
