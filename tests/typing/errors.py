"""What type checkers refuse. A comment that hides no error is an error itself (`warn_unused_ignores`)."""

from __future__ import annotations

import torch
from torch import nn

import easymp.optim
from easymp import Accelerator, CompileOptions, DistributedDataParallelKwargs, Settings

net, x = nn.Linear(2, 1), torch.ones(4, 2)
adamw = torch.optim.AdamW(net.parameters())

# -- misspelt names

acc = Accelerator(mixed_precission="bf16")  # type: ignore[call-arg]
Accelerator(kwargs_handlers=[])  # type: ignore[call-arg]
Settings(mixed_precission="bf16")  # type: ignore[call-arg]
acc.save_state(asynchronous=True)  # type: ignore[call-arg]
acc.load_state(map_location="cpu")  # type: ignore[call-arg]
acc.backward(x.sum(), keep_graph=True)  # type: ignore[call-arg]
acc.prepare(net, adamw, placement=[True])  # type: ignore[call-overload]
easymp.optim.Lion(net.parameters(), lrr=0.1)  # type: ignore[arg-type]
acc.sync_gradient  # type: ignore[attr-defined]  # noqa: B018
easymp.Acelerator()  # type: ignore[attr-defined]

# -- words that are not in the list

Accelerator(mixed_precision="bf8")  # type: ignore[arg-type]
Accelerator(strategy="zero3")  # type: ignore[arg-type]
Accelerator(log_with="tensorbord")  # type: ignore[arg-type]
Accelerator(log_with=["jsonl", "comet"])  # type: ignore[list-item]
Accelerator(nonfinite="ignore")  # type: ignore[arg-type]
Accelerator(compile="layers")  # type: ignore[arg-type]
Settings(strategy="dp")  # type: ignore[arg-type]
CompileOptions("layers")  # type: ignore[arg-type]
DistributedDataParallelKwargs(comm_hook="fp8")  # type: ignore[arg-type]
acc.reduce(x, "median")  # type: ignore[arg-type]
easymp.reduce(x, "median")  # type: ignore[arg-type]

# -- wrong types

Accelerator("bf16")  # type: ignore[call-arg]
Accelerator(gradient_accumulation_steps="4")  # type: ignore[arg-type]
Accelerator(strategy_options=CompileOptions())  # type: ignore[arg-type]
acc.backward(0.5)  # type: ignore[arg-type]
acc.clip_grad_norm_(net, 1.0)  # type: ignore[arg-type]
acc.accumulate(adamw)  # type: ignore[arg-type]
model, optimizer, rest = acc.prepare(net, adamw)  # type: ignore[misc]
acc.prepare(net).embed(x)  # type: ignore[operator]
easymp.find_executable_batch_size(lambda name: len(name))("digits")  # type: ignore[call-arg, arg-type]
