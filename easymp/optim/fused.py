"""torch's fused optimizer step, for optimizers that leave the implementation to torch."""

from __future__ import annotations

import torch

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
DEVICES = {torch.optim.Adagrad: {"cpu", "cuda"}}
EVERYWHERE = {"cpu", "cuda", "mps", "xpu"}


def fuse(optimizer: torch.optim.Optimizer) -> str | None:
    """Let `optimizer` run fused, if the user left that open and torch can; returns why not, or None when it now does.

    Only the ``fused`` entry of its param groups changes: the state, the numbers (within rounding, 3e-8) and checkpoints stay.
    Does nothing to subclasses, to which torch's rules need not apply.
    """
    kind = type(optimizer)
    if kind not in FUSED:
        return f"torch has no fused step for {kind.__name__}"
    for group in optimizer.param_groups:
        if group.get("fused") is not None or group.get("foreach") is not None:
            return "fused or foreach was chosen by the caller"
        if group.get("differentiable") or group.get("capturable"):
            return "a differentiable or capturable step was asked for"
        for parameter in group["params"]:
            if not torch.is_floating_point(parameter) or parameter.device.type not in DEVICES.get(kind, EVERYWHERE):
                return f"torch's fused {kind.__name__} does not take {parameter.dtype} on {parameter.device.type}"
    if optimizer.state and optimizer.param_groups[0]["params"][0].device.type != "cpu":
        return "it has stepped already, with its counters where the plain step keeps them"
    for group in optimizer.param_groups:
        group["fused"] = True
    optimizer.defaults["fused"] = True
    return None
