"""Our kernels, where CuPy runs them: the step after backward against torch's own."""

from __future__ import annotations

import torch

from ...cuda.cupy_launcher import Unavailable, launcher_for
from ...optim import AdamW
from . import samples
from .findings import LeftOut, Wrong

NEAR = 1e-5


def kernels(device: torch.device) -> str:
    """Ten steps of AdamW with clipping, by kernels and by torch."""
    if device.type != "cuda":
        raise LeftOut(f"they are for NVIDIA GPUs, and this rank trains on {device.type}")
    launcher = launcher_for(device)
    if isinstance(launcher, Unavailable):
        raise LeftOut(launcher.reason)
    ours, theirs = samples.model().to(device), samples.model().to(device)
    one, other = (
        AdamW(ours.parameters(), lr=samples.RATE),
        torch.optim.AdamW(theirs.parameters(), lr=samples.RATE),
    )
    inputs, labels = (part.to(device) for part in samples.data().tensors)
    for _ in range(10):
        for net, optimizer in ((ours, one), (theirs, other)):
            torch.nn.functional.cross_entropy(net(inputs), labels).backward()
            if optimizer is one:
                one.clip_grad_norm_(0.1)
            else:
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    far = max(float((a - b).abs().max()) for a, b in zip(ours.parameters(), theirs.parameters()))
    if not far <= NEAR:
        raise Wrong(f"after 10 steps a weight lies {far:.2g} from torch's; at most {NEAR:g} is rounding")
    return f"10 steps of AdamW with clipping are torch's, up to {far:.1g}"
