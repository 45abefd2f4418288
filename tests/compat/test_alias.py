"""easymp under the name accelerate: for a script, and for the libraries that train by it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from easymp.cli import main
from easymp.cli.launch import translate

EASYMP = [sys.executable, "-m", "easymp"]
NAMES = """
import importlib.metadata, importlib.util, sys, accelerate
from accelerate import Accelerator, dispatch_model, init_empty_weights
from accelerate.hooks import AlignDevicesHook
from accelerate.utils import DistributedType, set_module_tensor_to_device
import accelerate.utils.modeling, accelerate.big_modeling
assert importlib.util.find_spec("accelerate") and importlib.metadata.version("accelerate") == accelerate.__version__
assert importlib.metadata.metadata("accelerate")["Home-page"] == "https://github.com/huggingface/accelerate"
assert not hasattr(accelerate, "nothing") and importlib.util.find_spec("accelerate.nothing") is None
try:
    dispatch_model(None)
except Exception as error:
    print(error)
import torch
with init_empty_weights():
    model = torch.nn.Linear(2, 1)
assert model.weight.is_meta
set_module_tensor_to_device(model, "weight", "cpu", torch.ones(1, 2))
set_module_tensor_to_device(model, "bias", "cpu", torch.zeros(1))
acc = Accelerator()
model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
acc.backward(model(torch.ones(2, 2)).sum())
optimizer.step()
weights = acc.gather(model.weight.detach()[0, :1]).tolist()
plan = acc.num_processes, acc.mixed_precision, acc.plan.strategy.value, sys.argv[1:]
print(f"{type(acc).__module__} {plan} {weights}\\n", end="", flush=True)
acc.end_training()
"""


def run(*arguments, folder):
    env = {**os.environ, "EASYMP_LOG_WITH": "none"}
    process = subprocess.run([*EASYMP, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout


@pytest.mark.usefixtures("warm")
def test_fabric_has_both_of_its_names():
    program = """
from easymp.compat import install
install("lightning")
install("lightning_fabric")
import lightning as L, lightning.fabric.strategies
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from lightning_fabric import Fabric as again
assert L.Fabric is Fabric is again and Fabric.__module__ == "easymp.compat.lightning_fabric.fabric"
try:
    import lightning.pytorch
except ModuleNotFoundError as error:
    print(error)
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (process.stdout, process.returncode) == ("No module named 'lightning.pytorch'\n", 0), process.stderr


@pytest.mark.usefixtures("warm")
def test_a_program_that_installs_it_gets_easymp_unless_accelerate_is_imported():
    install = "from easymp.compat import install\ninstall()\n"
    imported_before = "import sys, types; sys.modules['accelerate'] = types.ModuleType('accelerate')\n"
    process, refused = (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        for program in (install + NAMES, imported_before + install)
    )
    assert "easymp.compat.accelerate.accelerator (1, 'no', 'single', []) [0.8" in process.stdout, process.stderr
    assert "dispatch_model is not part of easymp" in process.stdout
    assert "easymp launch --as accelerate" in refused.stderr


@pytest.mark.slow
def test_a_script_that_imports_accelerate_gets_easymp(tmp_path):
    (tmp_path / "train.py").write_text(NAMES)
    flags = ("--num_processes", "2", "--mixed_precision=bf16", "--cpu")
    printed = run("launch", "--as", "accelerate", *flags, "train.py", "--lr", "1", folder=tmp_path)
    plan = "easymp.compat.accelerate.accelerator (2, 'bf16', 'ddp', ['--lr', '1']) [0.8"
    assert printed.count(plan) == 2
    assert "dispatch_model is not part of easymp" in printed


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("--cpu --gradient_accumulation_steps=4", "--set cpu=true --set gradient_accumulation_steps=4"),
        ("--config_file a.json --cpu", "--set strategy=fsdp --processes 2 --set cpu=true"),
        ("--processes 1", "--processes 1"),
        ("--machine_rank 0 --num_machines 1 --cpu", "--set cpu=true"),
    ],
)
def test_flags_of_accelerate_launch(flags, settings, tmp_path):
    file = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_offload_params": False}, "num_processes": 2}
    (tmp_path / "a.json").write_text(json.dumps(file))
    arguments = flags.replace("a.json", str(tmp_path / "a.json")).split()
    script = ["train.py", "--cpu", "1"]
    assert translate([*arguments, *script], {"--processes": True}) == [*settings.split(), *script]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tpu", "--tpu of accelerate launch has no counterpart"),
        ("--zero_stage 2", "not in force"),
        ("--num_cpu_threads_per_process 2", "set OMP_NUM_THREADS=2"),
        ("--num_processes two", "num_processes = two is not a number"),
        ("--num_processes", "has no value"),
    ],
)
def test_flags_of_accelerate_launch_that_are_refused(flags, message, capfd):
    script = [] if message == "has no value" else ["train.py"]
    assert main(["launch", "--as", "accelerate", *flags.split(), *script]) == 2
    assert message in capfd.readouterr().err


LLAMA = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, attention_dropout=0.1, **sizes))
how = dict(per_device_train_batch_size=4, logging_steps=1, use_cpu=True, report_to=[], disable_tqdm=True)
def show(trainer):
    rows = [(row["step"], row.get("loss", row.get("eval_loss"))) for row in trainer.state.log_history]
    if trainer.is_world_process_zero():
        print("ROWS", [row for row in rows if row[1] is not None])
"""
TRAINER = f"""{LLAMA}
from transformers import Trainer, TrainingArguments
draw = torch.Generator().manual_seed(1)
data = [{{"input_ids": (row := torch.randint(0, 64, (16,), generator=draw)), "labels": row}} for _ in range(64)]
folder, options, resume = sys.argv[1], eval(sys.argv[2]), eval(sys.argv[3])
how |= dict(max_steps=6, save_steps=3, eval_strategy="steps", eval_steps=3, gradient_accumulation_steps=2, **options)
arguments = TrainingArguments(output_dir=folder, **how)
trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:10])
before = []
if trainer.accelerator.num_processes == 1:  # on several, Accelerate's models that were evaluated first train apart
    before = trainer.evaluate()["eval_loss"], float(trainer.predict(data[:4]).metrics["test_loss"])
trainer.state.log_history.clear()
trainer.train(resume_from_checkpoint=resume)
trainer.save_model(folder + "/final")
trainer.state.log_history += [dict(step="before", loss=loss) for loss in before]
show(trainer)
"""
FSDP = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}


def rows(printed):
    (row_text,) = re.findall(r"^ROWS (.*)$", printed, re.MULTILINE)
    return row_text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "options"), [(1, {}), (1, {"bf16": True}), (2, {}), (2, FSDP)], ids=["one", "bf16", "ddp", "fsdp"]
)
def test_the_trainer_of_transformers(tmp_path, processes, options):
    """It trains, evaluates, saves and resumes, with the numbers of Accelerate where that is installed."""
    pytest.importorskip("transformers")
    (tmp_path / "train.py").write_text(TRAINER)
    command = ("launch", "--processes", str(processes))
    as_easymp = (*command, "--as", "accelerate", "train.py")
    expected_rows = rows(run(*as_easymp, "run", repr(options), "None", folder=tmp_path))
    assert rows(run(*as_easymp, "run", repr(options), "'run/checkpoint-3'", folder=tmp_path)) == expected_rows
    assert (tmp_path / "run/final/model.safetensors").is_file()
    if not options:
        pytest.importorskip("accelerate")
        assert rows(run(*command, "train.py", "theirs", repr(options), "None", folder=tmp_path)) == expected_rows


SFT = f"""{LLAMA}
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer
words = ["<pad>", "<eos>", "<unk>", *"a b c d e f g h i j".split()]
tokenizer = Tokenizer(models.WordLevel({{word: i for i, word in enumerate(words)}}, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
data = Dataset.from_dict({{"text": ["a b c d e f g h", "b c d a", "i j i j i", "c d e f g a b"] * 8}})
how |= dict(max_steps=4, save_steps=2, bf16=False, max_length=32, eos_token="<eos>", pad_token="<pad>")
arguments = SFTConfig(output_dir="run", **how)
trainer = SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)
trainer.train()
show(trainer)
"""


@pytest.mark.slow
def test_the_sft_trainer_of_trl(tmp_path):
    pytest.importorskip("trl")
    (tmp_path / "train.py").write_text(SFT)
    easymp_rows = rows(run("launch", "--processes", "2", "--as", "accelerate", "train.py", folder=tmp_path))
    assert easymp_rows.count("(") == 4
    pytest.importorskip("accelerate")
    assert rows(run("launch", "--processes", "2", "train.py", folder=tmp_path)) == easymp_rows


DIFFUSERS = """
import os, sys, torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from sklearn.datasets import load_digits
resumes = len(sys.argv) > 1
acc = Accelerator(gradient_accumulation_steps=2, cpu=True, project_config=ProjectConfiguration(project_dir="run"))
def save_hook(models, weights, output_dir):
    if acc.is_main_process:
        ema.save_pretrained(os.path.join(output_dir, "unet_ema"))
        for model in models:
            model.save_pretrained(os.path.join(output_dir, "unet"))
            weights.pop()
def load_hook(models, input_dir):
    ema.load_state_dict(EMAModel.from_pretrained(os.path.join(input_dir, "unet_ema"), UNet2DModel).state_dict())
    for _ in range(len(models)):
        models.pop().load_state_dict(UNet2DModel.from_pretrained(input_dir, subfolder="unet").state_dict())
acc.register_save_state_pre_hook(save_hook)
acc.register_load_state_pre_hook(load_hook)
set_seed(0)
model = UNet2DModel(
    sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
)
ema = EMAModel(model.parameters(), decay=0.99, model_cls=UNet2DModel, model_config=model.config)
noising = DDPMScheduler(num_train_timesteps=100)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
images = torch.tensor(load_digits().images[:64], dtype=torch.float32)[:, None] / 8 - 1
loader = torch.utils.data.DataLoader([{"input": image} for image in images], batch_size=8)
schedule = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=2, num_training_steps=16)
model, optimizer, loader, schedule = acc.prepare(model, optimizer, loader, schedule)
step, first, losses = 0, 0, []
if resumes:
    acc.load_state("run/checkpoint-4")
    step, first = 4, 4 // (len(loader) // 2)
for epoch in range(first, 2):
    for i, batch in enumerate(loader):
        draw = torch.Generator().manual_seed(step * 10 + i)
        noise = torch.randn(batch["input"].shape, generator=draw)
        at = torch.randint(0, 100, (len(noise),), generator=draw)
        with acc.accumulate(model):
            loss = (model(noising.add_noise(batch["input"], noise, at), at).sample - noise).square().mean()
            acc.backward(loss)
            if acc.sync_gradients:
                acc.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if acc.sync_gradients:
            ema.step(model.parameters())
            step += 1
            if step == 4:
                acc.save_state(f"run/checkpoint-{step}")
        losses.append(round(acc.gather(loss.detach()[None]).mean().item(), 6))
if acc.is_main_process:
    DDPMPipeline(unet=acc.unwrap_model(model), scheduler=noising).save_pretrained("run")
    print("ROWS", losses[-8:])
acc.end_training()
"""


@pytest.mark.slow
def test_a_training_script_of_diffusers(tmp_path):
    """Hooks that save a U-Net and its moving average, and a script that counts its own epochs when it resumes."""
    pytest.importorskip("diffusers")
    (tmp_path / "train.py").write_text(DIFFUSERS)
    command = ("launch", "--processes", "1")
    expected_rows = rows(run(*command, "--as", "accelerate", "train.py", folder=tmp_path))
    assert rows(run(*command, "--as", "accelerate", "train.py", "resume", folder=tmp_path)) == expected_rows
    pytest.importorskip("accelerate")
    assert rows(run(*command, "train.py", folder=tmp_path)) == expected_rows


DEEPSPEED = """
import argparse, importlib.metadata, deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int)
args = parser.parse_args()
deepspeed.init_distributed()
assert args.local_rank == deepspeed.comm.get_local_rank() and deepspeed.zero.ZeroParamStatus is ZeroParamStatus
assert importlib.metadata.version("deepspeed") == deepspeed.__version__ and get_accelerator().device_name()
print(f"{deepspeed.initialize.__module__} {args.deepspeed_config} {args.local_rank}\\n", end="", flush=True)
deepspeed.comm.destroy_process_group()
"""


@pytest.mark.slow
def test_a_script_that_imports_deepspeed_gets_easymp_and_its_local_rank(tmp_path):
    (tmp_path / "train.py").write_text(DEEPSPEED)
    command = ("launch", "--as", "deepspeed", "--processes", "2", "train.py", "--deepspeed_config", "ds.json")
    printed = run(*command, folder=tmp_path)
    assert sorted(printed.splitlines()) == [f"easymp.compat.deepspeed ds.json {rank}" for rank in (0, 1)]


@pytest.mark.slow
def test_a_script_that_imports_fabric_gets_easymp(tmp_path):
    script = "from lightning.fabric import Fabric\nfabric = Fabric()\nfabric.launch()\n"
    (tmp_path / "train.py").write_text(script + "print(type(fabric).__module__, fabric.world_size, flush=True)\n")
    printed = run("launch", "--as", "lightning", "--processes", "2", "train.py", folder=tmp_path)
    assert printed.splitlines() == ["easymp.compat.lightning_fabric.fabric 2"] * 2
