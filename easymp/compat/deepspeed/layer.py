"""Messages of the DeepSpeed layer."""

from __future__ import annotations

from ..layer import Layer

layer = Layer("DeepSpeed")

NATIVE = """
acc = Accelerator(mixed_precision={precision!r}, strategy={strategy!r}, gradient_accumulation_steps={steps})
model, optimizer, loader = acc.prepare(model, optimizer, loader)
for inputs, targets in loader:
    with acc.accumulate(model):
        acc.backward(loss_fn(model(inputs), targets))  # engine.backward
        acc.clip_grad_norm_(model.parameters(), {clip})   # gradient_clipping
        optimizer.step()                               # engine.step
        optimizer.zero_grad()
acc.save_state()                                       # engine.save_checkpoint
"""
