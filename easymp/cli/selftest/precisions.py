"""Each precision that this machine does not refuse, against fp32."""

from __future__ import annotations

import torch
from torch import nn

from ...accelerator import Accelerator
from ...errors import RefusedError
from ...precision import PRECISIONS
from ...protocols import Precision
from . import samples
from .findings import Wrong

# How far outputs may lie from fp32's, as part of their size (2-norms): some roundings of the type, through six layers.
NEAR = {
    "tf32": 1e-2,
    "fp16": 1e-2,
    "O1": 1e-2,
    "O2": 1e-2,
    "O3": 1e-2,
    "fp16-true": 1e-2,
    "bf16": 5e-2,
    "bf16-true": 5e-2,
    "fp8": 0.25,
}
STEPS = 3


def plain(kind: type[Precision]) -> bool:
    """Whether its products are those of plain torch in fp32."""
    return kind.compute == torch.float32 and not kind.tf32


def precision(name: str) -> float:
    """Distance of the outputs from fp32's, as part of their size; then some training steps.

    Raises:
        RefusedError: not here.
        Wrong: too far, or gradients that are not finite.
    """
    acc = Accelerator(mixed_precision=name, deterministic=False)
    try:
        inputs, labels = (part.to(acc.device) for part in samples.data().tensors)
        net = samples.model().to(acc.device)
        with torch.no_grad():
            wanted = net(inputs)
        net, optimizer = acc.prepare(net, torch.optim.AdamW(net.parameters(), lr=samples.RATE))
        with torch.no_grad():
            found = net(inputs)
        distance = float((found.float() - wanted).norm() / wanted.norm())
        if not distance <= NEAR[name]:
            raise Wrong(
                f"{name}: outputs lie {distance:.2%} from fp32's; at most {NEAR[name]:.2%} is rounding"
            )
        for _ in range(STEPS):
            loss = nn.functional.cross_entropy(net(inputs), labels)
            acc.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            value = loss.item()
            if not value == value or value == float("inf"):
                raise Wrong(f"{name}: the loss is {value}")
        return distance
    finally:
        acc.close()


def precisions() -> str:
    """All of the registry, but for names of fp32."""
    good, refused = [], []
    for name, kind in PRECISIONS.items():
        if plain(kind):
            continue
        try:
            distance = precision(name)
        except RefusedError:
            refused.append(name)
        else:
            good.append(f"{name} {distance:.2%}")
    said = f"outputs off fp32's: {', '.join(good)}" if good else "fp32 only"
    return said + (f"; not here: {', '.join(refused)}" if refused else "")
