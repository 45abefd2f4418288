"""Muon: "Muon: An optimizer for hidden layers in neural networks" (Jordan et al., 2024), with AdamW for the rest.

The momentum of each weight matrix is replaced by the nearest orthogonal matrix, by five Newton-Schulz iterations in
bf16 with the coefficients of torch.optim.Muon. These products cost about as much as the forward of a few tokens for
each row. Ranks that hold the same matrices (ddp), or parts of them (fsdp, zero1), share them out: matrices of one shape
are stacked, each rank iterates on its share of the stack, and the results are exchanged in bf16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw as step_adamw

from ..base.dtensor import local
from ..errors import SettingError, StepError, check_whole
from .torch_step import loss_of

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of the odd polynomial of degree 5, as in torch.optim.Muon
EPSILON = 1e-7
ADAMW = ("*embed*", "*wte*", "*wpe*", "*head*")
LR_FACTORS: dict[str, Callable[[int, int], float]] = {  # by rows and columns
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
AT_ONCE = 2**27  # elements of a rank's share of a stack; it has at least one matrix


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of hidden layers, AdamW for the rest; they step as torch.optim.Muon and torch.optim.AdamW.

    AdamW moves every parameter that does not have two dimensions, weights of embeddings, and parameters whose names
    match `adamw`, by default embeddings and heads. Muon moves the others. Each param group has ``use_muon``, which says
    which of the two it is.

    Under ddp, zero1, fsdp and hsdp each rank orthogonalises its share of the matrices. State: ``momentum_buffer`` of a
    matrix; ``exp_avg``, ``exp_avg_sq`` and ``step`` of other parameters.

    Args:
        params: a model, its ``named_parameters()``, or param groups that have ``use_muon``.
        lr: length of a step; with "match_rms_adamw" it is AdamW's, too.
        weight_decay: decoupled, times lr.
        momentum: factor of the average of gradients.
        nesterov: step on the gradient blended with that average.
        ns_steps: iterations.
        adjust_lr_fn: factor of lr by a matrix's shape: "match_rms_adamw", so that an element moves as far as under
            AdamW, or "original", √max(1, rows / columns).
        adamw: patterns of names (`fnmatch`: * matches dots, too) of parameters that AdamW moves.
        adamw_lr: AdamW's lr. None: `lr`.
        adamw_weight_decay: AdamW's decay. None: `weight_decay`.
        betas: AdamW's β1 and β2.
        eps: AdamW's.

    Raises:
        SettingError: a number is out of range, parameters without names, or a parameter with `use_muon` that is not a
            real matrix.

    Example:
        >>> from easymp.optim import Muon
        >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 10))
        >>> optimizer = Muon(model, lr=0.01, adamw=("2.*",))  # the last layer is the head
        >>> [(group["use_muon"], group["param_names"]) for group in optimizer.param_groups]
        [(True, ['1.weight']), (False, ['0.weight', '1.bias', '2.weight', '2.bias'])]
        >>> model(torch.tensor([1])).sum().backward()
        >>> optimizer.step()
    """

    shared = False  # set by strategies under which all ranks of the run hold the same plain parameters and gradients
    _world_mesh: tuple[Any, Any] | None = None  # the group of all ranks, and its mesh

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        adamw: Sequence[str] = ADAMW,
        adamw_lr: float | Tensor | None = None,
        adamw_weight_decay: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        numbers = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "eps": eps, "ns_steps": ns_steps}
        adamw_options = {"lr": adamw_lr, "weight_decay": adamw_weight_decay}
        adamw_numbers = {f"adamw_{name}": value for name, value in adamw_options.items() if value is not None}
        for name, value in (numbers | adamw_numbers).items():
            if not (isinstance(value, (int, float, Tensor)) and value >= 0):
                raise SettingError(f"{name}={value!r} must be a number of at least 0")
        if momentum >= 1 or len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise SettingError(f"momentum={momentum} and the two betas={betas} must be from 0 to below 1")
        check_whole(f"ns_steps={ns_steps!r}", ns_steps, 0)
        if adjust_lr_fn not in LR_FACTORS:
            raise SettingError(f"adjust_lr_fn={adjust_lr_fn!r} is not one of {', '.join(LR_FACTORS)}")
        if isinstance(adamw, str):
            raise SettingError(f"adamw={adamw!r} must be a tuple of patterns: pass ({adamw!r},)")
        groups = list(_groups(params, adamw))
        for group in groups:
            for name, option in adamw_options.items() if group.get("use_muon") is False else ():
                if option is not None:
                    group.setdefault(name, option)
        defaults = {**numbers, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn, "betas": betas, "use_muon": None}
        super().__init__(groups, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if param_group.get("use_muon") not in (True, False):
            raise SettingError(
                'a param group of Muon needs "use_muon": True for weights of hidden layers, False for parameters that '
                "AdamW moves"
            )
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if not parameter.is_floating_point() or (param_group["use_muon"] and parameter.ndim != 2):
                del self.param_groups[-1]
                raise SettingError(
                    f"Muon got a parameter of shape {tuple(parameter.shape)} and {parameter.dtype} in a group with "
                    f"use_muon={param_group['use_muon']}: it moves real matrices, and AdamW other real tensors"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; a collective where ranks share the matrices.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            What the closure returns, or None.

        Raises:
            StepError: a gradient is sparse.
        """
        loss = loss_of(closure)
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if any(p.grad.is_sparse for p in parameters):
                raise StepError("Muon takes no sparse gradients: make the embedding with sparse=False")
            if group["use_muon"]:
                self._step_muon(group, parameters)
            elif parameters:
                self._step_adamw(group, parameters)
        return loss

    def _step_adamw(self, group: dict[str, Any], parameters: list[Any]) -> None:
        for p in parameters:
            state = self.state[p]
            if "step" not in state:
                state |= {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                state["step"] = torch.zeros((), device=p.device)
            elif state["step"].device != p.device:  # as a checkpoint may have it
                state["step"] = state["step"].to(p.device)
        states = [self.state[p] for p in parameters]
        step_adamw(
            params=[local(p) for p in parameters],
            grads=[local(p.grad) for p in parameters],
            exp_avgs=[local(state["exp_avg"]) for state in states],
            exp_avg_sqs=[local(state["exp_avg_sq"]) for state in states],
            max_exp_avg_sqs=[],
            state_steps=[state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _step_muon(self, group: dict[str, Any], parameters: list[Any]) -> None:
        lr, momentum = float(group["lr"]), group["momentum"]
        by_layout: dict[Any, list[Any]] = {}
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            layout = getattr(p, "device_mesh", None), tuple(getattr(p, "placements", ()))
            by_layout.setdefault((p.shape, p.dtype, p.device, layout), []).append(p)
        for matrices in by_layout.values():
            mesh, placements = self._layout(matrices[0])
            size = lr * LR_FACTORS[group["adjust_lr_fn"]](*matrices[0].shape)
            ranks = 1 if mesh is None else mesh.size()
            count = ranks * max(1, AT_ONCE // max(1, ranks * matrices[0].numel()))
            for batch in (matrices[i : i + count] for i in range(0, len(matrices), count)):
                gradients = [local(p.grad) for p in batch]
                averages = [local(self.state[p]["momentum_buffer"]) for p in batch]
                torch._foreach_lerp_(averages, gradients, 1 - momentum)
                if group["nesterov"]:
                    averages = list(torch._foreach_lerp(gradients, averages, momentum))
                stack = torch.stack([average.bfloat16() for average in averages])
                shape = (len(batch), *batch[0].shape)
                updates = orthogonalised(stack, group["ns_steps"], mesh, placements, shape)
                weights = [local(p) for p in batch]
                torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
                torch._foreach_sub_(weights, [u.to(w.dtype) for u, w in zip(updates, weights)], alpha=size)

    def _layout(self, parameter: Any) -> tuple[Any, Sequence[Any]]:
        """The mesh of ranks that hold parts of `parameter`, and its placements; None where it is this rank's alone."""
        if hasattr(parameter, "placements"):
            return parameter.device_mesh, parameter.placements
        if not self.shared or not dist.is_initialized():
            return None, ()
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate

        if self._world_mesh is None or self._world_mesh[0] is not dist.group.WORLD:
            self._world_mesh = dist.group.WORLD, init_device_mesh(parameter.device.type, (dist.get_world_size(),))
        return self._world_mesh[1], [Replicate()]


def _groups(params: Any, patterns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The param groups of `params`."""
    embeddings: set[int] = set()
    if isinstance(params, nn.Module):
        modules = (m for m in params.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)))
        embeddings = {id(m.weight) for m in modules}
        params = params.named_parameters()
    items = list(params) if isinstance(params, Iterable) else [params]
    if items and all(isinstance(item, dict) for item in items):
        yield from (dict(item) for item in items)
        return
    if not all(isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) for item in items):
        raise SettingError(
            "Muon cannot tell embeddings and heads from hidden layers without names: pass the model, "
            'model.named_parameters(), or param groups with "use_muon": True or False'
        )
    by_use: dict[bool, list[tuple[str, Tensor]]] = {True: [], False: []}
    for name, p in items:
        by_adamw = p.ndim != 2 or id(p) in embeddings or any(fnmatchcase(name, pattern) for pattern in patterns)
        by_use[not by_adamw].append((name, p))
    yield from ({"params": params_of_use, "use_muon": use} for use, params_of_use in by_use.items() if params_of_use)


def newton_schulz(stack: Tensor, steps: int) -> Tensor:
    """Matrices near the orthogonal factor of those of `stack`, (number, rows, columns) in bf16."""
    a, b, c = COEFFICIENTS
    tall = stack.shape[1] > stack.shape[2]
    x = stack.mT if tall else stack
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPSILON)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def orthogonalised(
    stack: Tensor, steps: int, mesh: Any, placements: Sequence[Any], shape: Sequence[int]
) -> Sequence[Tensor]:
    """Orthogonalise matrices of which each rank has a part. Each iterates on some; returns this rank's parts."""
    if mesh is None:
        return newton_schulz(stack, steps).unbind()
    from torch.distributed.tensor import DTensor, Shard

    stride = (shape[1] * shape[2], shape[2], 1)
    parts = [_for_stack(placement) for placement in placements]
    by_matrix = [Shard(0)] * mesh.ndim
    distributed = DTensor.from_local(stack, mesh, parts, run_check=False, shape=torch.Size(shape), stride=stride)
    share = newton_schulz(distributed.redistribute(placements=by_matrix).to_local(), steps)
    results = DTensor.from_local(share, mesh, by_matrix, run_check=False, shape=torch.Size(shape), stride=stride)
    return results.redistribute(placements=parts).to_local().unbind()


def _for_stack(placement: Any) -> Any:
    """The placement of a stack of matrices that have this one."""
    if placement.is_replicate():
        return placement
    options = {name: getattr(placement, name) for name in ("split_factor",) if hasattr(placement, name)}
    return type(placement)(placement.dim + 1, **options)
