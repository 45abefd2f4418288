"""Settings: where each value comes from, and what a wrong one is told."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from easymp import Accelerator, SettingError, Settings, Source, resolve
from easymp.base import env
from easymp.settings import Launching, resolve_launching


@pytest.fixture(autouse=True)
def _nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No project file but the test's own, and no setting of the caller's shell."""
    monkeypatch.chdir(tmp_path)
    for name in env.names(env.PREFIX):
        monkeypatch.delenv(name)


def write(text: str, name: str = "easymp.toml") -> Path:
    path = Path(name)
    path.write_text(text, encoding="utf-8")
    return path


def test_a_default_that_is_asked_for_counts() -> None:
    with env.override(EASYMP_FUSED="0", EASYMP_SEED="7"):
        for settings in (Settings(fused=True, seed=None), copy.deepcopy(Settings(fused=True))):
            assert (resolve(settings).fused, resolve(settings).seed) == (True, 7)
            assert resolve(settings).source("fused") == (Source.ASKED, "asked for")
        assert resolve(Settings("auto")).source("mixed_precision")[0] is Source.ASKED
        other = dataclasses.replace(Settings(), timeout=5.0)  # which passes all fields
        assert (resolve(other).fused, resolve(other).timeout) == (False, 5.0)


def test_easymp_config_names_the_file() -> None:
    write("seed = 1")
    other = write("seed = 2", "other.toml")
    with env.override(EASYMP_CONFIG=str(other)):
        settings = resolve()
    assert settings.seed == 2
    assert settings.source("seed") == (Source.CONFIG, "other.toml")
    with (
        env.override(EASYMP_CONFIG="nowhere.toml"),
        pytest.raises(SettingError, match=r"EASYMP_CONFIG='nowhere.toml'.*no file"),
    ):
        resolve()
    with env.override(EASYMP_CONFIG="."), pytest.raises(SettingError, match="no file"):
        resolve()
    with env.override(EASYMP_CONFIG=""):
        assert resolve().seed == 1


# -- types -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["0", "false", "No", "OFF"])
def test_words_for_no(word: str) -> None:
    with env.override(EASYMP_FUSED=word):
        assert resolve().fused is False


def test_values_take_the_fields_type() -> None:
    settings = resolve(gradient_accumulation_steps=4.0, timeout="2", mixed_precision="BF16", seed="3")
    assert (
        settings.gradient_accumulation_steps,
        settings.timeout,
        settings.mixed_precision,
        settings.seed,
    ) == (
        4,
        2.0,
        "bf16",
        3,
    )
    assert type(settings.gradient_accumulation_steps) is int
    assert type(settings.timeout) is float
    assert resolve(seed=2**64 - 1).seed == 2**64 - 1  # not through a float


@pytest.mark.parametrize(
    ("said", "size"),
    [
        (1024, 1024), (16e9, 16_000_000_000), ("16e9", 16_000_000_000), ("16GiB", 16 << 30), ("16 gib", 16 << 30), ("1.5GB", 1_500_000_000),
        ("500MB", 500_000_000), ("3KiB", 3072), ("2TiB", 2 << 40), ("7b", 7),
    ],
)  # fmt: skip
def test_sizes(said: object, size: int) -> None:
    assert resolve(memory=said).memory == size
    with env.override(EASYMP_MEMORY=str(said)):
        assert resolve().memory == size
    write(f"memory = {said!r}")
    assert resolve().memory == size


WRONG = [
    ("gradient_accumulation_steps", 0, "below the smallest possible value, 1"),
    ("gradient_accumulation_steps", 1.5, "not a whole number"),
    ("gradient_accumulation_steps", True, "not a whole number"),
    ("gradient_accumulation_steps", "many", "not a whole number"),
    ("gradient_accumulation_steps", [2], "not a whole number"),
    ("seed", -1, "below the smallest possible value, 0"),
    ("seed", 2**64, "above the largest possible value"),
    ("seed", float("inf"), "not a whole number"),
    ("memory", "16G", "is no size"),
    ("memory", "lots", "is no size"),
    ("memory", 0, "is no size"),
    ("memory", -5, "is no size"),
    ("memory", True, "is no size"),
    ("memory", "1.2.3MB", "is no size"),
    ("memory", float("inf"), "is no size"),
    ("timeout", 0, "below the smallest possible value, 0.001"),
    ("timeout", "soon", "not a number"),
    ("timeout", float("nan"), "not a number"),
    ("timeout", float("inf"), "above the largest possible value"),
    ("cpu", "maybe", "neither yes nor no"),
    ("deterministic", 2, "neither yes nor no"),
    ("mixed_precision", 16, "is of type int, but a word is needed"),
    ("mixed_precision", "bf61", "did you mean 'bf16'"),
    ("strategy", "dp", "did you mean 'ddp'"),
]


@pytest.mark.parametrize(("name", "value", "words"), WRONG)
def test_a_wrong_value_is_refused_wherever_it_stands(name: str, value: object, words: str) -> None:
    with pytest.raises(SettingError, match=words) as argument:
        resolve(**{name: value})
    assert str(argument.value).startswith(f"{name}=")
    with pytest.raises(SettingError, match=words):
        Settings(**{name: value})


def test_wrong_values_outside_the_script() -> None:
    with (
        env.override(EASYMP_MIXED_PRECISION="bf61"),
        pytest.raises(SettingError, match=r"^EASYMP_MIXED_PRECISION='bf61'.*'bf16'\?"),
    ):
        resolve()
    with (
        env.override(EASYMP_SEED="x"),
        pytest.raises(SettingError, match=r"^EASYMP_SEED='x' is not a whole number"),
    ):
        resolve()
    write('strategy = "ddpp"')
    with pytest.raises(SettingError, match=r"easymp.toml, line 1: strategy = 'ddpp' is not one of .*'ddp'\?"):
        resolve()
    write("strategy = ['ddp']")
    with pytest.raises(SettingError, match=r"easymp.toml, line 1: strategy = .*of type list, but a word"):
        resolve()
    write("cpu = 1")
    with pytest.raises(SettingError, match=r"easymp.toml, line 1: cpu = 1 is neither yes nor no"):
        resolve()


def test_wrong_names_meet_the_nearest_right_one() -> None:
    with pytest.raises(SettingError, match="'precision' is no setting, did you mean 'mixed_precision'"):
        resolve(precision="bf16")
    with (
        env.override(EASYMP_SEDE="1"),
        pytest.raises(SettingError, match=r"EASYMP_SEDE.*did you mean 'EASYMP_SEED'\?"),
    ):
        resolve()
    with env.override(EASYMP_CONFG="1"), pytest.raises(SettingError, match=r"did you mean 'EASYMP_CONFIG'\?"):
        resolve()
    write("Strategy_ = 'ddp'")
    with pytest.raises(
        SettingError,
        match=r"easymp.toml, line 1: 'Strategy_' is no setting, did you mean 'strategy'\? Known: ",
    ):
        resolve()
    write("[easymp]\nseed = 1")
    with pytest.raises(SettingError, match="'easymp' is no setting"):
        resolve()


def test_a_line_of_the_file_is_named_wherever_the_key_stands() -> None:
    for text, line in (
        ("# sede = 1\n\nsede = 1", 3),
        ('"sede" = 1', 1),
        ("seed = 1\n[launch]\nnodes = '2'\n[sede]\nx = 1", 4),
        ("sede.x = 1", 1),
    ):
        write(text)
        with pytest.raises(
            SettingError, match=rf"easymp.toml, line {line}: 'sede' is no setting, did you mean 'seed'\?"
        ):
            resolve()


def test_an_override_wins_over_arguments_and_says_so() -> None:
    with env.override(EASYMP_OVERRIDE="mixed_precision=bf16 seed=3 project_dir='a b'"):
        settings = resolve(Settings(seed=1), mixed_precision="fp32", seed=2)
    assert (settings.mixed_precision, settings.seed, settings.project_dir) == ("bf16", 3, "a b")
    assert settings.source("seed") == (Source.ASKED, "seed=3 in EASYMP_OVERRIDE")
    for wrong in ("sede=1", "seed", "seed=x"):
        with (
            env.override(EASYMP_OVERRIDE=wrong),
            pytest.raises(SettingError, match=r"^EASYMP_OVERRIDE.*'?(sede|seed)"),
        ):
            resolve()


def test_launching_has_a_table_of_its_own() -> None:
    write("seed = 1\n[launch]\nprocesses = 2\nnodes = '1:4'")
    assert resolve().seed == 1
    assert resolve_launching() == Launching(processes=2, nodes="1:4")
    write("[launch]\nnodes = 2")
    assert resolve_launching() == Launching(nodes="2")
    assert resolve_launching(processes=3, nodes="4") == Launching(processes=3, nodes="4")
    with pytest.raises(SettingError, match="processes=0 is below"):
        resolve_launching(processes=0)
    with pytest.raises(SettingError, match=r"'there\.toml' is no file"):
        resolve_launching("there.toml")


def test_a_setting_in_the_wrong_table_is_told_its_place() -> None:
    write("processes = 2")
    with pytest.raises(
        SettingError, match=r"line 1: 'processes' is no setting: it belongs to the table \[launch\]"
    ):
        resolve()
    write("[launch]\nseed = 2")
    with pytest.raises(
        SettingError, match=r"line 2: 'seed' is no setting of \[launch\]: it belongs to the top of the file"
    ):
        resolve_launching()
    write("[launch]\nnode = 2")
    with pytest.raises(
        SettingError, match=r"line 2: 'node' is no setting of \[launch\], did you mean 'nodes'\?"
    ):
        resolve_launching()
    write("launch = 2")
    with pytest.raises(SettingError, match=r"line 1: launch = 2 is no table"):
        resolve_launching()


def test_a_broken_file_is_named() -> None:
    write("seed = ")
    with pytest.raises(SettingError, match=r"easymp.toml is not valid TOML"):
        resolve()
    Path("easymp.toml").write_bytes(b'strategy = "\xff"')
    with pytest.raises(SettingError, match=r"easymp.toml is not valid TOML"):
        resolve()


places = st.sampled_from(["argument", "object", "environment", "file"])


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.dictionaries(places, st.integers(1, 9)))
def test_precedence_whatever_is_given_where(given_in: dict[str, int]) -> None:
    name = "gradient_accumulation_steps"
    Path("easymp.toml").unlink(missing_ok=True)
    if "file" in given_in:
        write(f"{name} = {given_in['file']}")
    with env.override(
        EASYMP_GRADIENT_ACCUMULATION_STEPS=str(given_in["environment"]) if "environment" in given_in else None
    ):
        whole = Settings(**{name: given_in["object"]}) if "object" in given_in else None
        settings = resolve(whole, **{name: given_in.get("argument")})
    order = [
        given_in.get("argument"),
        given_in.get("object"),
        given_in.get("environment"),
        given_in.get("file"),
        1,
    ]
    assert getattr(settings, name) == next(value for value in order if value is not None)


@pytest.mark.parametrize(
    ("setting", "theirs", "ours"),
    [
        *(
            ("strategy", word, "fsdp")
            for word in ("zero2", "zero3", "ZeRO-3", "deepspeed", "fsdp2", "FULL_SHARD", "SHARD_GRAD_OP")
        ),
        *(("strategy", word, "tensor_parallel") for word in ("tp", "mp")),
        *(
            ("strategy", word, other)
            for word, other in (
                ("dp", "ddp"),
                ("pp", "pipeline"),
                ("HYBRID_SHARD", "hsdp"),
                ("zero", "zero1"),
            )
        ),
        *(
            ("mixed_precision", word, other)
            for word, other in (("bf16-mixed", "bf16"), ("16-mixed", "fp16"), ("32", "fp32"))
        ),
    ],
)
def test_a_name_from_elsewhere_is_answered_with_ours(setting: str, theirs: str, ours: str) -> None:
    with pytest.raises(SettingError, match=f"{theirs!r} is not one of .* did you mean {ours!r}"):
        Settings(**{setting: theirs})


def blocks() -> torch.nn.Module:
    return torch.nn.Sequential(
        *(torch.nn.TransformerEncoderLayer(4, 1, 8, 0.0, batch_first=True) for _ in range(2))
    )


def recomputed(model: torch.nn.Module) -> bool:
    """Whether the first block runs again in backward."""
    calls: list[int] = []
    model[0].linear1.register_forward_hook(lambda *_: calls.append(1))
    model(torch.ones(1, 2, 4)).sum().backward()
    return len(calls) > 1


@pytest.mark.parametrize("text", ["blocks", "TransformerEncoderLayer", "0, 1", "no"])
def test_the_file_says_what_is_recomputed_and_compiled(
    text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("easymp.toml").write_text(f'activation_checkpointing = "{text}"\ncompile = "blocks"\n')
    with Accelerator(cpu=True, mixed_precision="no", compile=False) as acc:
        assert recomputed(acc.prepare(blocks())) == (text != "no")
    with Accelerator(cpu=True, mixed_precision="no", compile=False, activation_checkpointing=False) as acc:
        assert not recomputed(acc.prepare(blocks()))
    with Accelerator(cpu=True, mixed_precision="no", activation_checkpointing=False) as acc:
        assert acc.prepare(blocks())[0]._compiled_call_impl is not None
    monkeypatch.setenv("EASYMP_COMPILE", "no")
    with Accelerator(cpu=True, mixed_precision="no") as acc:
        assert acc.prepare(blocks())[0]._compiled_call_impl is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "strategy_options = 3",
            "line 1: strategy_options = 3 is no table: write .strategy_options., and its settings below",
        ),
        ("seed = 1\n[strategy_options]\nbuckets = 1", "line 2: strategy 'single' has no option 'buckets'"),
        (
            "compile = true",
            "line 1: compile = True is of type bool, but a word is needed: one of no, model, blocks",
        ),
        ("compile = 'layers'", "line 1: compile = 'layers' is not one of no, model, blocks"),
        ("activation_checkpointing = ','", "nor a pattern of module or class names"),
    ],
)
def test_wrong_options_in_the_file_are_refused(
    text: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("easymp.toml").write_text(text)
    with pytest.raises(SettingError, match=said):
        Accelerator(cpu=True)
