"""Settings: where each value comes from, and what a wrong one is told."""

from __future__ import annotations

import copy
import dataclasses
import os
import shlex
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from easymp import Accelerator, FSDPOptions, SettingError, Settings, Source, resolve
from easymp.settings import resolve_launching


@pytest.fixture(autouse=True)
def _nowhere(tmp_path, monkeypatch):
    """No project file but the test's own, and no setting of the caller's shell."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("EASYMP_")]:
        monkeypatch.delenv(name)


def write(text, name="easymp.toml"):
    Path(name).write_text(text, encoding="utf-8")


# -- where a value comes from ------------------------------------------------------------------------------------------

PLACES = ["argument", "object", "environment", "file"]


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(PLACES), st.integers(1, 9)))
def test_precedence_whatever_is_given_where(given_in: dict[str, int]) -> None:
    name = "gradient_accumulation_steps"
    write(f"{name} = {given_in['file']}" if "file" in given_in else "")
    with pytest.MonkeyPatch.context() as patch:
        if "environment" in given_in:
            patch.setenv(f"EASYMP_{name.upper()}", str(given_in["environment"]))
        whole = Settings(**{name: given_in["object"]}) if "object" in given_in else None
        settings = resolve(whole, **{name: given_in.get("argument")})
    assert getattr(settings, name) == next((given_in[place] for place in PLACES if place in given_in), 1)


def test_a_default_that_is_asked_for_counts(monkeypatch):
    monkeypatch.setenv("EASYMP_FUSED", "0")
    monkeypatch.setenv("EASYMP_SEED", "7")
    for settings in (Settings(fused=True, seed=None), copy.deepcopy(Settings(fused=True))):
        assert (resolve(settings).fused, resolve(settings).seed) == (True, 7)
        assert resolve(settings).source("fused") == (Source.ASKED, "fused=True")
    assert resolve(Settings("auto")).source("mixed_precision")[0] is Source.ASKED
    other = dataclasses.replace(Settings(), timeout=5.0)  # which passes all fields
    assert (resolve(other).fused, resolve(other).timeout) == (False, 5.0)


def test_easymp_config_names_the_file(monkeypatch):
    write("seed = 1")
    write("seed = 2", "other.toml")
    monkeypatch.setenv("EASYMP_CONFIG", "other.toml")
    assert (resolve().seed, resolve().source("seed")) == (2, (Source.CONFIG, "other.toml"))
    monkeypatch.setenv("EASYMP_CONFIG", "")
    assert resolve().seed == 1


def test_an_override_wins_over_arguments_and_says_so(monkeypatch):
    monkeypatch.setenv("EASYMP_OVERRIDE", "mixed_precision=bf16 seed=3 project_dir='a b'")
    settings = resolve(Settings(seed=1), mixed_precision="fp32", seed=2)
    assert (settings.mixed_precision, settings.seed, settings.project_dir) == ("bf16", 3, "a b")
    assert settings.source("seed") == (Source.ASKED, "seed=3 by --set")


def test_a_table_replaces_the_one_below_and_an_option_changes_it(monkeypatch):
    write("[strategy_options]\nwrap = 'blocks'\ncpu_offload = true")
    monkeypatch.setenv("EASYMP_OVERRIDE", "strategy_options.wrap=3 compile.mode=default")
    settings = resolve(compile="blocks")
    assert settings.strategy_options == {"wrap": 3, "cpu_offload": True}
    assert settings.compile == {"what": "blocks", "mode": "default"}
    words = "easymp.toml, line 1 and strategy_options.wrap=3 by --set"
    assert settings.source("strategy_options") == (Source.ASKED, words)
    record = resolve(strategy_options=FSDPOptions(cpu_offload=True)).strategy_options
    assert FSDPOptions(**record) == FSDPOptions(cpu_offload=True, wrap=3)
    monkeypatch.setenv("EASYMP_STRATEGY_OPTIONS", "{wrap = 2}")
    monkeypatch.delenv("EASYMP_OVERRIDE")
    assert resolve().strategy_options == {"wrap": 2}


# -- what comes of it --------------------------------------------------------------------------------------------------

# A setting in the file, in a variable and in an override; and what comes of it.
REACHED = [
    ("strategy_options", "[strategy_options]\nwrap = ['A', 'B']", '{"wrap": ["A", "B"]}', {"wrap": ("A", "B")}),
    ("strategy_options", "strategy_options.cpu_offload = true", "{cpu_offload = true}", {"cpu_offload": True}),
    ("scaler_options", "[scaler_options]\ninit_scale = 8", "{init_scale = 8}", {"init_scale": 8}),
    ("dataloader_config", "[dataloader_config]\ndata_seed = 1", '{"data_seed": 1}', {"data_seed": 1}),
    ("compile", "[compile]\nmode = 'default'", "{mode = 'default'}", {"mode": "default"}),
    ("compile", "compile = true", "true", "model"),
    ("compile", "compile = 'blocks'", "BLOCKS", "blocks"),
    ("activation_checkpointing", "activation_checkpointing = ['A', 'b.*']", "A,b.*", "A,b.*"),
    ("activation_checkpointing", "activation_checkpointing = true", "true", "blocks"),
    ("activation_checkpointing", "activation_checkpointing = '0'", "0", "0"),  # a module's name
    ("log_with", "log_with = ['jsonl', 'mlflow']", "jsonl,mlflow", "jsonl,mlflow"),
    ("save_on_signal", "save_on_signal = true", "1", True),
    ("fused", "fused = false", "No", False),
    ("fused", "fused = false", "OFF", False),
    ("timeout", "timeout = 2", "2", 2.0),
    ("mixed_precision", "mixed_precision = 'BF16'", "BF16", "bf16"),
    ("gradient_accumulation_steps", "gradient_accumulation_steps = 4.0", "4", 4),
    ("seed", f"seed = {2**64 - 1}", f"{2**64 - 1}", 2**64 - 1),
    ("memory", "memory = 16e9", "16e9", 16_000_000_000),
    ("memory", "memory = '16 gib'", "16 gib", 16 << 30),
    ("memory", "memory = '1.5GB'", "1.5GB", 1_500_000_000),
    ("memory", "memory = '7b'", "7b", 7),
]  # fmt: skip


@pytest.mark.parametrize(("name", "toml", "text", "value"), REACHED)
def test_each_way_to_say_it_means_the_same(name, toml, text, value, monkeypatch):
    def means_it(settings) -> bool:
        found = getattr(settings, name)
        return found == value and type(found) is type(value)

    write(toml)
    assert means_it(resolve())
    write("")
    with monkeypatch.context() as patch:
        patch.setenv(f"EASYMP_{name.upper()}", text)
        assert means_it(resolve())
    monkeypatch.setenv("EASYMP_OVERRIDE", f"{name}={shlex.quote(text)}")
    assert means_it(resolve(**{name: None}))
    assert means_it(resolve(Settings(**{name: value})))


def blocks() -> torch.nn.Module:
    layers = (torch.nn.TransformerEncoderLayer(4, 1, 8, 0.0, batch_first=True) for _ in range(2))
    return torch.nn.Sequential(*layers)


def recomputed(model: torch.nn.Module) -> bool:
    """Whether the first block runs again in backward."""
    calls: list[int] = []
    model[0].linear1.register_forward_hook(lambda *_: calls.append(1))
    model(torch.ones(1, 2, 4)).sum().backward()
    return len(calls) > 1


def test_the_file_says_what_is_recomputed_and_compiled(monkeypatch):
    how = {"cpu": True, "mixed_precision": "no"}
    for text in ("TransformerEncoderLayer", "0, 1", "no", "blocks"):
        write(f'activation_checkpointing = "{text}"\ncompile = "blocks"\n')
        with Accelerator(compile=False, **how) as acc:
            assert recomputed(acc.prepare(blocks())) == (text != "no")
    with Accelerator(activation_checkpointing=False, compile=False, **how) as acc:
        assert not recomputed(acc.prepare(blocks()))
    with Accelerator(activation_checkpointing=False, **how) as acc:
        assert acc.prepare(blocks())[0]._compiled_call_impl is not None
    monkeypatch.setenv("EASYMP_COMPILE", "no")
    with Accelerator(**how) as acc:
        assert acc.prepare(blocks())[0]._compiled_call_impl is None


# -- refusals ----------------------------------------------------------------------------------------------------------

WRONG = [
    *(("gradient_accumulation_steps", value, "not a whole number") for value in (1.5, True, "many", [2])),
    *(("memory", value, "is not a size") for value in ("16G", "lots", 0, -5, True, "1.2.3MB", float("inf"))),
    ("gradient_accumulation_steps", 0, "below the smallest possible value, 1"),
    ("seed", -1, "below the smallest possible value, 0"),
    ("seed", 2**64, "above the largest possible value"),
    ("timeout", 0, "below the smallest possible value, 0.001"),
    ("timeout", float("nan"), "not a number"),
    ("timeout", float("inf"), "above the largest possible value"),
    ("cpu", "maybe", "neither yes nor no"),
    ("deterministic", 2, "neither yes nor no"),
    ("mixed_precision", 16, "is of type int, but a word is needed"),
    *(("mixed_precision", w, f"did you mean '{p}'") 
      for w, p in [("bf61", "bf16"), ("16-mixed", "fp16"), ("32", "fp32")]),
    *(("strategy", word, "did you mean 'fsdp'") for word in ("zero2", "ZeRO-3", "FULL_SHARD", "deepspeed")),
    *(("strategy", word, "did you mean 'tensor_parallel'") for word in ("tp", "mp")),
    *(("strategy", w, f"did you mean '{s}'") for w, s in [("dp", "ddp"), ("pp", "pipeline"), ("HYBRID_SHARD", "hsdp")]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "words"), WRONG)
def test_a_wrong_value_is_refused_wherever_it_stands(name, value, words):
    with pytest.raises(SettingError, match=words) as argument:
        resolve(**{name: value})
    assert str(argument.value).startswith(f"{name}=")
    with pytest.raises(SettingError, match=words):
        Settings(**{name: value})


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("ZeRO-2", "did you mean 'fsdp' with reshard_after_forward=false"),
        ("SHARD_GRAD_OP", "did you mean 'fsdp' with reshard_after_forward=false"),
        ("zero3-offload", "did you mean 'fsdp' with cpu_offload=true"),
        ("hybrid_shard_zero2", "did you mean 'hsdp' with reshard_after_forward=false"),
        ("ddp_find_unused_parameters_true", "did you mean 'ddp' with find_unused_parameters=true"),
        ("deepspeed_stage_2_offload", "did you mean 'fsdp' with reshard_after_forward=false and cpu_offload=true"),
        ("1f1b", "did you mean 'pipeline' with schedule='1f1b'"),
    ],
)
def test_another_librarys_strategy_is_answered_with_ours(word, answer):
    with pytest.raises(SettingError, match=rf"{answer}\?"):
        resolve(strategy=word)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("EASYMP_MIXED_PRECISION", "bf61", r"^EASYMP_MIXED_PRECISION='bf61'.*'bf16'\?"),
        ("EASYMP_SEED", "x", "^EASYMP_SEED='x' is not a whole number"),
        ("EASYMP_SEDE", "1", r"EASYMP_SEDE.*did you mean 'EASYMP_SEED'\?"),
        ("EASYMP_CONFG", "1", r"did you mean 'EASYMP_CONFIG'\?"),
        ("EASYMP_CONFIG", "nowhere.toml", "EASYMP_CONFIG='nowhere.toml'.*no file"),
        ("EASYMP_CONFIG", ".", "no file"),
        ("EASYMP_STRATEGY_OPTIONS", "x", r"^EASYMP_STRATEGY_OPTIONS='x' is not a table: write \[strategy_op"),
        ("EASYMP_COMPILE", "{", "^EASYMP_COMPILE='{' is neither one of no, model, blocks nor a table"),
        ("EASYMP_OVERRIDE", "seed.x=1", "^EASYMP_OVERRIDE: seed.x=1: 'seed.x' is not a setting"),
        ("EASYMP_OVERRIDE", "sede=1", "^EASYMP_OVERRIDE.*'?sede"),
        ("EASYMP_OVERRIDE", "seed", "^EASYMP_OVERRIDE.*'?seed"),
        ("EASYMP_OVERRIDE", "seed=x", "^EASYMP_OVERRIDE.*'?seed"),
    ],
)
def test_wrong_variables(variable, value, words, monkeypatch):
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingError, match=words):
        resolve()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("strategy = 'ddpp'", r"easymp.toml, line 1: strategy = 'ddpp' is not one of .*'ddp'\?"),
        ("strategy = ['ddp']", "easymp.toml, line 1: strategy = .*of type list, but a word"),
        ("cpu = 1", "easymp.toml, line 1: cpu = 1 is neither yes nor no"),
        ("Strategy_ = 'ddp'", r"'Strategy_' is not a setting, did you mean 'strategy'\? Known: "),
        ("[easymp]\nseed = 1", "'easymp' is not a setting"),
        ("# sede = 1\n\nsede = 1", r"line 3: 'sede' is not a setting, did you mean 'seed'\?"),
        ("seed = 1\n[launch]\nnodes = '2'\n[sede]\nx = 1", "line 4: 'sede' is not a setting"),
        ("processes = 2", r"line 1: 'processes' is not a setting: it belongs to the table \[launch\]"),
        ("seed = ", "easymp.toml is not valid TOML"),
        ("seed = 1\nsede.x = 1", "line 2: 'sede' is not a setting"),
        ("strategy_options = 3", "line 1: strategy_options = 3 is not a table: write .strategy_options"),
        ("seed = 1\n[strategy_options]\nbuckets = 1", "line 2: strategy 'single' has no option 'buckets'"),
        ("strategy = 'single'\n[strategy_options]\nwrap = 1", "line 2: .* no option 'wrap': it belongs to fsdp, hsdp"),
        ("compile = 3", "line 1: compile = 3 is neither one of no, model, blocks nor a table"),
        ("[compile]\nbackend = 'x'", "line 1: torch.compile has no backend 'x' here"),
        ("[scaler_options]\ninit_scale = 0", "line 1: init_scale=0 is not a finite number above 0"),
        ("[scaler_options]\nscale = 0", "line 1: scaler_options has no option 'scale'"),
        ("[dataloader_config]\nsplit_batches = 1", "line 1: split_batches=1 is neither True nor False"),
        ("compile = 'layers'", "line 1: compile = 'layers' is not one of no, model, blocks"),
        ("activation_checkpointing = ','", "nor patterns of module or class names"),
        ("[launch]\nseed = 2", "line 2: 'seed' is not a setting"),
        ("[launch]\nnode = 2", r"line 2: 'node' is not a setting of \[launch\], did you mean 'nodes'\?"),
        ("launch = 2", "line 1: launch = 2 is not a table"),
    ],
)
def test_wrong_files(text, words):
    write(text)
    with pytest.raises(SettingError, match=words):
        resolve_launching() if "launch" in text.partition("\n")[0] else Accelerator(cpu=True)
