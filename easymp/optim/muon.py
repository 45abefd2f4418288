"""Muon: "Muon: An optimizer for hidden layers in neural networks" (Jordan et al., 2024), with AdamW for all other parameters.

The momentum of each weight matrix is replaced by the nearest orthogonal matrix, by five Newton-Schulz iterations in bf16 with the
coefficients of torch.optim.Muon. These products cost about as much as the forward of a few tokens for each row. Ranks that hold the same
matrices (ddp), or parts of them (fsdp, zero1), share them out: matrices of one shape are stacked, each rank iterates on its share of the
stack, and the results are exchanged in bf16.
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
from ..errors import SettingError, StepError
from .torch_step import evaluated

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of the odd polynomial of degree 5, as in torch.optim.Muon
EPSILON = 1e-7
ADAMW = ("*embed*", "*wte*", "*wpe*", "*head*")
SHAPES = {  # factor of lr by (rows, columns)
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
AT_ONCE = 2**27  # elements of a stack; a rank has at least one matrix of it


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of hidden layers, AdamW for the rest; the steps are those of torch.optim.Muon and torch.optim.AdamW.

    AdamW moves every parameter that does not have two dimensions, weights of embeddings, and parameters whose names match `adamw`, by
    default embeddings and heads. Muon moves the others. Each param group has ``use_muon``, which says which of the two it is.

    Under ddp, zero1, fsdp and hsdp each rank orthogonalises its share of the matrices. State: ``momentum_buffer`` of a matrix;
    ``exp_avg``, ``exp_avg_sq`` and ``step`` of other parameters.

    Args:
        params: a model, its ``named_parameters()``, or param groups that have ``use_muon``.
        lr: length of a step; with "match_rms_adamw" it is AdamW's, too.
        weight_decay: decoupled, times lr.
        momentum: factor of the average of gradients.
        nesterov: step on the gradient blended with that average.
        ns_steps: iterations.
        adjust_lr_fn: factor of lr by a matrix's shape: "match_rms_adamw", so that an element moves as far as under AdamW, or
            "original", √max(1, rows / columns).
        adamw: patterns of names (`fnmatch`: * matches dots, too) of parameters that AdamW moves.
        adamw_lr: AdamW's lr. None: `lr`.
        adamw_weight_decay: AdamW's decay. None: `weight_decay`.
        betas: AdamW's β1 and β2.
        eps: AdamW's.

    Raises:
        SettingError: a number is out of range, parameters without names, or a parameter with `use_muon` that is not a real matrix.

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
        numbers = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "eps": eps}
        numbers["ns_steps"] = ns_steps
        given = {"adamw_lr": adamw_lr, "adamw_weight_decay": adamw_weight_decay}
        for name, value in (numbers | {name: v for name, v in given.items() if v is not None}).items():
            if not (isinstance(value, (int, float, Tensor)) and value >= 0):
                raise SettingError(f"{name}={value!r} must be a number of at least 0")
        if momentum >= 1 or len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise SettingError(f"momentum={momentum} and the two betas={betas} must be from 0 to below 1")
        if type(ns_steps) is not int:
            raise SettingError(f"ns_steps={ns_steps} must be an integer: it counts iterations")
        if adjust_lr_fn not in SHAPES:
            raise SettingError(f"adjust_lr_fn={adjust_lr_fn!r} is not one of {', '.join(SHAPES)}")
        if isinstance(adamw, str):
            raise SettingError(f"adamw={adamw!r} must be a tuple of patterns: pass ({adamw!r},)")
        more = {"nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn, "betas": betas, "use_muon": None}
        groups = list(_groups(params, adamw))
        for group in groups:
            if group.get("use_muon") is False:
                theirs = {"lr": adamw_lr, "weight_decay": adamw_weight_decay}
                group.update({k: v for k, v in theirs.items() if v is not None and k not in group})
        super().__init__(groups, {**numbers, **more})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if param_group.get("use_muon") not in (True, False):
            which = "True for weights of hidden layers, False for parameters that AdamW moves"
            raise SettingError(f'a param group of Muon needs "use_muon": {which}')
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if not parameter.is_floating_point() or (param_group["use_muon"] and parameter.ndim != 2):
                del self.param_groups[-1]
                it = f"a parameter of shape {tuple(parameter.shape)} and {parameter.dtype}"
                where = f"a group with use_muon={param_group['use_muon']}"
                raise SettingError(
                    f"Muon got {it} in {where}: it moves real matrices, and AdamW other real tensors"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update; a collective where ranks share the matrices.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            What the closure returns, or None.

        Raises:
            StepError: a gradient is sparse.
        """
        loss = evaluated(closure)
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            if any(p.grad.is_sparse for p in held):
                raise StepError("Muon takes no sparse gradients: make the embedding with sparse=False")
            if held:
                (self._step_muon if group["use_muon"] else self._step_adamw)(group, held)
        return loss

    def _step_adamw(self, group: dict[str, Any], held: list[Tensor]) -> None:
        for p in held:
            state = self.state[p]
            if "step" not in state:
                state |= {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                state["step"] = torch.zeros((), device=p.device)
            elif state["step"].device != p.device:  # as a checkpoint may have it
                state["step"] = state["step"].to(p.device)
        lists = [[local(self.state[p][key]) for p in held] for key in ("exp_avg", "exp_avg_sq")]
        how: dict[str, Any] = {key: group[key] for key in ("lr", "weight_decay", "eps")}
        how |= dict(zip(("beta1", "beta2"), group["betas"]), fused=True, amsgrad=False, maximize=False)
        grads: Any = [local(p.grad) for p in held]  # type: ignore[arg-type]
        steps = [self.state[p]["step"] for p in held]
        step_adamw([local(p) for p in held], grads, *lists, [], steps, **how)

    def _step_muon(self, group: dict[str, Any], held: list[Tensor]) -> None:
        lr, after = float(group["lr"]), 0
        alike: dict[Any, list[Tensor]] = {}
        for p in held:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            layout = getattr(p, "device_mesh", None), tuple(getattr(p, "placements", ()))
            alike.setdefault((p.shape, p.dtype, p.device, layout), []).append(p)
        for of in alike.values():
            ranks = _Ranks(of[0], self.shared)
            rows, columns = of[0].shape
            size = lr * SHAPES[group["adjust_lr_fn"]](rows, columns)
            many = ranks.size * max(1, AT_ONCE // max(1, ranks.size * of[0].numel()))
            for batch in (of[i : i + many] for i in range(0, len(of), many)):
                grads: Any = [local(p.grad) for p in batch]  # type: ignore[arg-type]
                averages: Any = [local(self.state[p]["momentum_buffer"]) for p in batch]
                torch._foreach_lerp_(averages, grads, 1 - group["momentum"])
                if group["nesterov"]:
                    averages = torch._foreach_lerp(grads, averages, group["momentum"])
                steps = ranks.orthogonalised(averages, group["ns_steps"], after)
                after += len(batch)
                here: Any = [local(p) for p in batch]
                torch._foreach_mul_(here, 1 - lr * group["weight_decay"])
                torch._foreach_sub_(here, [s.to(h.dtype) for s, h in zip(steps, here)], alpha=size)


def _groups(params: Any, patterns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The param groups of `params`."""
    words: set[int] = set()
    if isinstance(params, nn.Module):
        kinds = (nn.Embedding, nn.EmbeddingBag)
        words = {id(m.weight) for m in params.modules() if isinstance(m, kinds)}
        params = params.named_parameters()
    given = list(params) if isinstance(params, Iterable) else [params]
    if given and all(isinstance(item, dict) for item in given):
        yield from (dict(item) for item in given)
        return
    if not all(isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) for item in given):
        ways = 'pass the model, model.named_parameters(), or param groups with "use_muon": True or False'
        raise SettingError(f"Muon cannot tell embeddings and heads from hidden layers without names: {ways}")
    split: dict[bool, list[tuple[str, Tensor]]] = {True: [], False: []}
    for name, p in given:
        others = p.ndim != 2 or id(p) in words or any(fnmatchcase(name, pattern) for pattern in patterns)
        split[not others].append((name, p))
    yield from ({"params": found, "use_muon": use} for use, found in split.items() if found)


def orthogonalised(stack: Tensor, steps: int) -> Tensor:
    """Matrices near the orthogonal factor of those of `stack`, (number, rows, columns) in bf16."""
    a, b, c = COEFFICIENTS
    tall = stack.shape[1] > stack.shape[2]
    x = stack.mT if tall else stack
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPSILON)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class _Ranks:
    """The ranks that share matrices like `parameter`, and how each holds them; `shared` as of `Muon`."""

    def __init__(self, parameter: Any, shared: bool) -> None:
        self._like, self._dim, self._group, self.size, self._rank = parameter, -1, None, 1, 0
        self._whole = False  # each rank needs the whole result of a DTensor whose layout is not known here
        placements = getattr(parameter, "placements", None)
        if placements is None:
            if shared and dist.is_initialized():
                self.size, self._rank = dist.get_world_size(), dist.get_rank()
            return
        cut = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
        if len(cut) == 1 and type(placements[cut[0]]).__name__ == "Shard":
            mesh = parameter.device_mesh
            self._dim, self._group = placements[cut[0]].dim, mesh.get_group(cut[0])
            self.size, self._rank = mesh.size(cut[0]), mesh.get_local_rank(cut[0])
        else:
            self._whole = bool(cut)

    def orthogonalised(self, matrices: Sequence[Tensor], steps: int, after: int) -> list[Tensor]:
        """Of this rank's parts of matrices, its parts of the results; `after` others in this step."""
        if self._whole:
            return [self._by_all(matrix, steps) for matrix in matrices]
        if self._dim >= 0:
            return self._of_parts(matrices, steps, after)
        each, slot, mine = self._share_of(len(matrices), after)
        shape = self._like.shape
        stack = torch.zeros((self.size * each, *shape), dtype=torch.bfloat16, device=self._like.device)
        pieces = stack.chunk(self.size)
        if mine:
            here = pieces[slot][:mine]
            torch._foreach_copy_(list(here.unbind()), list(matrices[slot * each :][:mine]))
            here.copy_(orthogonalised(here, steps))
        if self.size > 1:
            of_ranks = [_bytes(pieces[(rank - after) % self.size]) for rank in range(self.size)]
            dist.all_gather(of_ranks, _bytes(pieces[slot]))
        return list(stack[: len(matrices)].unbind())

    def _share_of(self, count: int, after: int) -> tuple[int, int, int]:
        """The most matrices of a rank, which piece of so many is this rank's, and the number in it."""
        # The first piece goes to the rank that follows `after` matrices before these, so that shapes of few matrices fall on all ranks.
        each, slot = -(-count // self.size), (self._rank - after) % self.size
        return each, slot, min(max(count - slot * each, 0), each)

    def _of_parts(self, parts: Sequence[Tensor], steps: int, after: int) -> list[Tensor]:
        """Each rank gets the parts of its share of the matrices, and sends the parts of the results back."""
        turn = (lambda t: t.mT) if self._dim == 1 else (lambda t: t)
        rows, columns = self._like.shape if self._dim == 0 else self._like.shape[::-1]
        each, _, mine = self._share_of(len(parts), after)
        most = -(-rows // self.size)  # of a rank, as torch.chunk cuts
        here = turn(parts[0]).shape[0]
        sent = torch.zeros((self.size * each, most, columns), dtype=torch.bfloat16, device=self._like.device)
        torch._foreach_copy_([s[:here] for s in sent.unbind()[: len(parts)]], [turn(p) for p in parts])
        pieces = (self.size, each, most, columns)
        came = self._exchanged(sent.view(pieces).roll(after, 0))
        whole = came.transpose(0, 1).reshape(each, self.size * most, columns)
        if mine:
            matrices = whole[:mine, :rows]
            matrices.copy_(turn(orthogonalised(turn(matrices), steps)))
        back = whole.view(each, self.size, most, columns).transpose(0, 1).contiguous()
        results = self._exchanged(back).roll(-after, 0).view(-1, most, columns)[: len(parts), :here]
        return [turn(result) for result in results.unbind()]

    def _exchanged(self, stack: Tensor) -> Tensor:
        """The r-th piece goes to rank r."""
        got = torch.empty_like(stack)
        dist.all_to_all_single(_bytes(got), _bytes(stack), group=self._group)
        return got

    def _by_all(self, part: Tensor, steps: int) -> Tensor:
        """On a mesh of several dimensions that cut: gathered, and computed on every rank."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        p = self._like
        split = DTensor.from_local(
            part.bfloat16(), p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
        )
        whole = orthogonalised(split.full_tensor()[None], steps)[0]
        return local(distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)  # not every backend knows bf16
