"""Preparation: what a user brings, checked, agreed on by the ranks, wrapped, and kept.

Models come first, since optimizers are checked against them; then optimizers, loaders, and schedulers, which follow optimizers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader

from .. import cuda, optim
from ..base.dtensor import follow
from ..base.pytree import send_to_device
from ..base.rng import diverge
from ..data import PreparedLoader, SkippedLoader, prepare_loader
from ..distributed import first_difference, odd_one_out
from ..errors import PrepareError, RefusedError, StepError, WorldError
from ..logging import get_logger
from ..options import DataLoaderConfiguration
from ..precision import Scaler
from ..precision.mixed import LOW, raise_weights
from ..protocols import Choice, Manner, Precision, Strategy
from ..strategies.batchnorm import batchnorms, convert_sync_batchnorm
from ..strategies.blocks import refuse_sparse
from ..strategies.meta_init import materialise, on_meta
from ..strategies.transforms import CompileOptions, Compiling, Which, find_recomputed, recompute
from .memory import AutoStrategy
from .replicas import ADDED, Replicas, describe, describe_record
from .state import Run
from .wrapper import Route, forward_methods, make_view

if TYPE_CHECKING:
    from ..optim import Masters
    from ..optim.engine import Engine
    from ..optim.optimizer import PreparedOptimizer, PreparedScheduler

logger = get_logger(__name__)

# Settings by which ranks may differ: what was decided by them is compared, or it does not change what is trained.
MAY_DIFFER = {
    *("mixed_precision", "strategy", "gradient_accumulation_steps"),
    *("cpu", "timeout", "memory", "project_dir", "log_with", "sources"),
}


class Prepared(NamedTuple):
    """A prepared model: what the user holds, and how it is called."""

    view: nn.Module
    route: Route


class Wishes(NamedTuple):
    """What the constructor was told about preparing.

    Attributes:
        place: move models and batches to the device.
        loading: how loaders read.
        schedule: makes a prepared scheduler of a scheduler and the prepared optimizers that it drives.
        strategy_options: options of the strategy were given.
        initialize: gives values to modules that were built on the meta device.
        recompute: which modules are computed again in backward.
        compile: what torch.compile is applied to, if anything.
        records: options, as dataclasses, that must be the same on all ranks.
    """

    place: bool
    loading: DataLoaderConfiguration
    schedule: Callable[[Any, Sequence[PreparedOptimizer]], PreparedScheduler]
    strategy_options: bool = False
    initialize: Callable[[nn.Module], None] | None = None
    recompute: Which = False
    compile: CompileOptions | None = None
    records: Sequence[Any] = ()


class Preparation:
    """All that one run has prepared.

    Attributes:
        strategy: how models are spread; "auto" may take another one when the first models come.
        models, optimizers, schedulers, loaders: in the order they came.
        owner: id of a prepared parameter → its name.
        stepped_by: id of a parameter → its optimizer.
        masters: id of a low-precision parameter → its fp32 master, where the precision has some.
        sums: fp32 sums of low-precision gradients over a window.
        batch: how the global batch comes about, in words.
        converted: batch-norms that became synchronised ones, and the classes they had.
        replicas: what compares parameters over the ranks; None where there is one rank, or it is off.
    """

    def __init__(
        self,
        run: Run,
        strategy: Strategy,
        precision: Precision,
        scaler: Scaler,
        wishes: Wishes,
        no_sync: Callable[[nn.Module], AbstractContextManager[Any]],
    ) -> None:
        self._no_sync = no_sync
        self._run, self._precision, self._scaler, self._wishes = run, precision, scaler, wishes
        self.strategy = strategy
        self._fitting = AutoStrategy(run, precision, free=not wishes.strategy_options)
        self.models: list[Prepared] = []
        self.optimizers: list[PreparedOptimizer] = []
        self.schedulers: list[PreparedScheduler] = []
        self.loaders: list[PreparedLoader] = []
        self.owner: dict[int, str] = {}
        self.stepped_by: dict[int, PreparedOptimizer] = {}
        self.masters: dict[int, torch.Tensor] = {}
        self.sums = optim.Sums(self.masters)
        self.batch = ""
        self._raised: dict[int, torch.dtype] = {}  # id of a parameter → the dtype that it came in
        self._told: list[str] = []  # of the weights, in the plan
        self.converted: list[tuple[nn.Module, type]] = []
        self.replicas: Replicas | None = None
        every = run.plan.settings.replica_check
        if every and run.world.size > 1:
            self.replicas = Replicas(run.world, every, self.models, self.optimizers, self.owner)
            run.clock.stepped.append(self.replicas.stepped)
        self._whose: list[
            tuple[PreparedOptimizer, str | None]
        ] = []  # optimizers, and why torch has no fused step for each
        self._compiling = Compiling(wishes.compile) if wishes.compile else None
        self._undo: list[
            Callable[[], None]
        ] = []  # what is done to models in place, beside what a strategy does
        self._seed = run.plan.settings.seed
        self._alike = self._seed is not None  # whether all ranks still draw from one random stream

    def prepare(
        self,
        objects: Sequence[Any],
        device_placement: Sequence[bool | None] | None,
        methods: str | Sequence[str] = (),
    ) -> list[Any]:
        """`objects`, ready for this run, in the same order; `methods` of the models among them are called as forward is."""
        if device_placement is not None and len(device_placement) != len(objects):
            raise PrepareError(
                f"device_placement has {len(device_placement)} values for {len(objects)} objects: pass one for each"
            )
        new = list(dict.fromkeys(o for o in objects if isinstance(o, nn.Module) and self._known(o) is None))
        named = dict(zip(new, forward_methods(new, methods)))
        self._agree(objects, [f"forward methods {names}" for names in named.values()])
        place = [self._wishes.place if p is None else p for p in device_placement or [None] * len(objects)]
        done: dict[int, Any] = {}
        models = [(i, o) for i, o in enumerate(objects) if isinstance(o, nn.Module)]
        optimizers = [o for o in objects if isinstance(o, torch.optim.Optimizer)]
        plain = [self._plain(o) for o in optimizers]
        self.strategy = self._fitting.choose(new, plain, self.strategy)
        if self.strategy.only_forward and any(names for names in named.values()):
            raise RefusedError(
                f"forward_methods: strategy {self.strategy.name!r} {self.strategy.only_forward}. Call the model itself, or use 'ddp'"
            )
        if self.replicas is not None:
            self.replicas.follow(self.strategy)
        self._fitting.reduce_early(new, plain, self.strategy, self._run.clock.accumulation > 1)
        self._outfit(new)
        for i, model in models:
            done[i] = self._prepare_model(model, optimizers, place[i], named.get(model, ()))
        for kind in (
            torch.optim.Optimizer,
            DataLoader,
            object,
        ):  # what follows the models; schedulers follow the optimizers
            for i, item in enumerate(objects):
                if i not in done and isinstance(item, kind):
                    done[i] = self._prepare_other(item, place[i])
        if models and self._alike:
            diverge(self.strategy.data_rank)  # ranks that share their data share its dropout
            self._alike = False
        self._say_batch()
        return [done[i] for i in range(len(objects))]

    @property
    def seed(self) -> int:
        """Of the data order and of ranks' random streams, the same on all ranks."""
        return torch.initial_seed() if self._seed is None else self._seed

    @staticmethod
    def _plain(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer.optimizer if isinstance(optimizer, optim.PreparedOptimizer) else optimizer

    def _known(self, model: nn.Module) -> Prepared | None:
        return next((p for p in self.models if model is p.view or model is p.route.original), None)

    def _outfit(self, models: Sequence[nn.Module]) -> None:
        """What is done to `models` under any strategy, before it wraps them, in this order: what is recomputed is compiled, too."""
        if self._run.plan.settings.convert_sync_batchnorm and self.strategy.data_size > 1:
            for model in models:
                self.converted += [(module, type(module)) for module in batchnorms(model)]
                convert_sync_batchnorm(model, self.strategy.data_group)
        if self._wishes.recompute:
            self._undo.append(recompute(find_recomputed(models, self._wishes.recompute)))
        if self._compiling:
            for model in models:
                self._precision.decide(model)  # timing would compile the model in both
            self._compiling.blocks(models, self.strategy.sharded)

    def _prepare_other(self, item: Any, place: bool) -> Any:
        if item is None or isinstance(
            item, (optim.PreparedOptimizer, optim.PreparedScheduler, PreparedLoader, SkippedLoader)
        ):
            return item
        if isinstance(item, torch.optim.Optimizer):
            return self._prepare_optimizer(item)
        if isinstance(item, DataLoader):
            return self._prepare_loader(item, place)
        if callable(getattr(item, "step", None)) and hasattr(item, "state_dict"):
            return self._prepare_scheduler(item)
        raise PrepareError(
            f"prepare() got a {type(item).__name__}, which is no Module, Optimizer, scheduler or DataLoader: leave it out "
            "(a data set goes into a DataLoader first)"
        )

    def _prepare_model(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        place: bool,
        methods: Sequence[str],
    ) -> nn.Module:
        known = self._known(model)
        if known is not None:
            return known.view
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise PrepareError(
                f"the model is already in a {type(model).__name__}: pass its .module, the strategy does the wrapping"
            )
        for name, parameter in model.named_parameters():
            if id(parameter) in self.owner:
                raise PrepareError(
                    f"parameter {name!r} of this {type(model).__name__} was prepared before, as {self.owner[id(parameter)]!r}: prepare "
                    "one module that holds both parts, once"
                )
        plain = [self._plain(o) for o in optimizers]
        if self._precision.raises:
            self._raise_weights(model)
        if not self.strategy.sharded and on_meta(model):
            materialise(
                model, self._run.world.device if place else torch.device("cpu"), self._wishes.initialize
            )
        manner = Manner(self._precision, place, self._wishes.initialize)
        if self._compiling:
            manner = manner._replace(compile=self._compiling.whole)
        if methods:
            self._precision.decide(model)  # a timing would be one of forward
        wrapped = self.strategy.wrap(model, plain, manner)
        self._run.world.hurry_groups()
        if self._precision.masters or (self.strategy.sums and self._run.clock.accumulation != 1):
            why = "gradients of low-precision parameters are summed in fp32, dense ones only"
            refuse_sparse(model, why, "keep its weights in fp32", narrow=True)
        view, route = make_view(
            model,
            wrapped,
            self._run.world.blame,
            lambda: self._no_sync(model),
            methods,
            self.strategy.once,
            self.strategy.sharded,
        )
        self.models.append(Prepared(view, route))
        self.owner.update((id(p), name) for name, p in model.named_parameters())
        if self.strategy.sums and self.sums.watch(model):
            self._say_sums()
        return view

    def _raise_weights(self, model: nn.Module) -> None:
        raised = raise_weights(model)
        if raised:
            self._raised.update((id(p), dtype) for p, dtype in raised)
            kinds = " and ".join(sorted({str(dtype).removeprefix("torch.") for _, dtype in raised}))
            number = sum(p.numel() for p, _ in raised)
            self._say_weights(
                f"{number:,} trainable parameters of {type(model).__name__} raised from {kinds}"
            )

    def _prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> PreparedOptimizer:
        for prepared in self.optimizers:
            if prepared.given is optimizer:
                return prepared
        kind = type(optimizer).__name__
        for g, group in enumerate(optimizer.param_groups):
            self._check_free(
                *(f"{kind} holds", f" (param group {g})", group["params"]),
                "prepare the model in the same call or before, and build the optimizer from that model's parameters",
            )
        own = isinstance(optimizer, optim.FusedOptimizer)  # chooses its step itself
        if own and optimizer.options.ema_decay is not None and self._run.plan.settings.ema_decay is not None:
            raise PrepareError(
                f"ema_decay was given to {kind} and to the Accelerator, which would keep one average twice: give it to one"
            )
        held = [id(p) for group in optimizer.param_groups for p in group["params"]]
        follow(optimizer, self._raised)
        why_not: str | None = None
        fused = self._run.plan.settings.fused
        masters = self._masters_for(optimizer)
        self._keep_frozen(optimizer, (p for group in optimizer.param_groups for p in group["params"]))
        if own and not fused:
            optimizer.use_plain_torch()
        if fused and not own:  # before it is spread: an optimizer in its place has a class of its own
            why_not = optim.fuse(optimizer, [model.route.original for model in self.models])
        stepped = self.strategy.spread(optimizer)
        if isinstance(stepped, optim.FusedOptimizer) and self.strategy.counting.add is not None:
            stepped.count_by(self.strategy.counting)
        engine = optim.engine_for(
            *(
                stepped,
                self.strategy.counting,
                fused,
                self._run.plan.settings.ema_decay,
                masters,
                self._gave_way,
            ),
            scaled=self._scaler.enabled,
        )
        self._same_kernels(stepped, engine)
        prepared = optim.PreparedOptimizer(
            stepped, self._run.clock, self._scaler, optimizer, masters, self.sums, engine
        )
        self.stepped_by.update((p, prepared) for p in held)
        vars(optimizer)["add_param_group"] = partial(self._add_param_group, optimizer, prepared)
        self.optimizers.append(prepared)
        self._scaler.sharers = len(self.optimizers)
        if fused:
            self._whose.append((prepared, why_not))
            self._say_steps()
        return prepared

    def _masters_for(self, optimizer: torch.optim.Optimizer) -> Masters | None:
        """fp32 masters of low-precision weights, unless the optimizer rounds them stochastically, or the precision wants neither.

        Raises:
            PrepareError: they are needed, and the strategy has no place for them.
        """
        policy, kind = self._precision, type(optimizer).__name__
        low = [
            p
            for group in optimizer.param_groups
            for p in group["params"]
            if p.requires_grad and p.dtype in LOW
        ]
        number = f"{sum(p.numel() for p in low):,} low-precision parameters"
        if not policy.masters:
            if not low or not policy.keeps_updates:
                return None
            seed = (self._run.plan.settings.seed or 0) % 2**63
            own = isinstance(optimizer, optim.FusedOptimizer) and all(p.dtype == torch.bfloat16 for p in low)
            if own and optimizer.round_from(seed):
                self._say_weights(f"{kind} steps {number} with stochastic rounding")
                return None
            if not self.strategy.masters:
                raise PrepareError(
                    f"{kind} would lose small updates of {self.owner[id(low[0])]!r}, which is {low[0].dtype}: it has no stochastic "
                    f"rounding, and strategy {self.strategy.name!r} has no place for fp32 masters. Use easymp.optim.AdamW, which "
                    "rounds stochastically, or mixed_precision='bf16', which keeps weights in fp32"
                )
        self._say_weights(f"{kind} steps fp32 masters of {number}")
        return optim.Masters(optimizer, self.masters, frozen=policy.masters)

    def _keep_frozen(self, optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
        """Low-precision `parameters` that are frozen now keep their dtype, so a step that finds one of them unfrozen is refused."""
        frozen = [p for p in parameters if not p.requires_grad and p.dtype in LOW]
        if not frozen or self._precision.masters or not self._precision.keeps_updates:
            return

        def check(*_: Any) -> None:
            for parameter in frozen:
                self._check_wide(parameter)

        optim.indifferent.add(check)
        self._undo.append(optimizer.register_step_pre_hook(check).remove)

    def _check_wide(self, parameter: torch.Tensor) -> None:
        """It is no low-precision parameter that trains since `prepare`, which raises it or gives it a master."""
        if parameter.requires_grad and parameter.dtype in LOW:
            raise StepError(
                f"{self.owner.get(id(parameter), 'a parameter')!r} trains now, but was frozen or in no optimizer when it was prepared, and "
                f"stayed {parameter.dtype}, where small updates are lost: call requires_grad_(True) and give it to the optimizer before "
                "prepare() (free_memory() lets you prepare again)"
            )

    def _say_weights(self, words: str) -> None:
        """One more sentence about the weights, in the plan."""
        choice = self._run.plan.weights
        self._told = [*self._told, words]
        self._run.plan = self._run.plan.replace(
            weights=replace(choice, reason="; ".join(dict.fromkeys(self._told)))
        )
        logger.info("weights: %s", words)

    def _check_free(self, holds: str, where: str, parameters: Iterable[torch.Tensor], remedy: str) -> None:
        """`parameters` are prepared models', and no prepared optimizer steps them."""
        for parameter in parameters:
            if id(parameter) not in self.owner:
                raise PrepareError(
                    f"{holds} a parameter of shape {tuple(parameter.shape)}{where} that belongs to no prepared model: {remedy}"
                )
            if id(parameter) in self.stepped_by:
                raise PrepareError(
                    f"{holds} parameter {self.owner[id(parameter)]!r}, which another prepared optimizer steps already: give each parameter "
                    "to one optimizer (free_memory() lets go of the old ones)"
                )

    def _add_param_group(
        self, optimizer: torch.optim.Optimizer, prepared: PreparedOptimizer, group: dict[str, Any]
    ) -> None:
        """What the user's optimizer does from here on in place of its own `add_param_group`, which it calls."""
        items = group["params"]
        if not isinstance(items, (torch.Tensor, set)):  # of a set torch says that it has no order
            items = group["params"] = list(items)
        added = (
            [items]
            if isinstance(items, torch.Tensor)
            else [p[1] if isinstance(p, tuple) else p for p in items]
        )
        if (
            self._run.world.size == 1
        ):  # nothing is to be averaged, so that what models have been given since will do
            self.owner.update(
                (id(p), name) for model in self.models for name, p in model.route.original.named_parameters()
            )
        self._check_free(f"{type(optimizer).__name__}.add_param_group got", "", added, ADDED)
        rounds = (
            isinstance(optimizer, optim.FusedOptimizer) and optimizer.options.stochastic_rounding is not False
        )
        if self._precision.keeps_updates and not prepared.has_masters and not rounds:
            for parameter in added:
                self._check_wide(parameter)
        type(optimizer).add_param_group(optimizer, group)
        self._keep_frozen(optimizer, added)
        prepared.take_group()
        self.stepped_by.update((id(p), prepared) for p in added)
        if self.replicas is not None:
            self.replicas.begin_again(prepared)

    def _same_kernels(self, stepped: torch.optim.Optimizer, engine: Engine) -> None:
        """Our kernels run on all ranks, or on none: gradients are to be measured in the same way, by the same collectives."""
        world = self._run.world
        if world.size == 1 or world.device.type != "cuda":
            return
        own = stepped if isinstance(stepped, optim.FusedOptimizer) else None
        here = isinstance(engine, optim.CupyEngine) if own is None else own.engine.kernels is not None
        if world.any(not here) and here:
            reason = "our kernels do not run on all ranks"
            if own is not None:
                own.do_without(reason)
            elif isinstance(engine, optim.CupyEngine):
                engine.give_way(reason)

    def _say_steps(self) -> None:
        """Which step runs of each optimizer, and why, in the plan."""
        steps: dict[str, list[str]] = {"CuPy": [], "fused": [], "as given": []}
        for optimizer, why_not in self._whose:
            engine, kind = optimizer.engine, type(optimizer.given).__name__
            if engine.name == "CuPy":
                steps["CuPy"].append(engine.reason)
                continue
            if isinstance(optimizer.given, optim.FusedOptimizer):
                way = optimizer.given.engine
                steps["CuPy" if way.kernels else "fused"].append(
                    f"easymp's {kind} by {way.name}: {way.reason}"
                )
                continue
            because = f": {engine.reason}" if engine.reason and self._run.world.device.type == "cuda" else ""
            steps["as given" if why_not else "fused"].append((why_not or f"torch's fused {kind}") + because)
        value = ", ".join(v for v, reasons in steps.items() if reasons)
        reason = "; ".join(dict.fromkeys(r for reasons in steps.values() for r in reasons))
        self._run.plan = self._run.plan.replace(
            optimizer=Choice(value, reason, self._run.plan.optimizer.source)
        )

    def _gave_way(self, reason: str) -> None:
        """Kernels failed, and torch steps from here on."""
        cuda.warn_once(reason)
        self._say_steps()

    def _prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        for prepared in self.schedulers:
            if prepared.scheduler is scheduler:
                return prepared
        drives = getattr(scheduler, "optimizer", None)
        mine = [o for o in self.optimizers if drives is None or drives is o or drives is o.given]
        if not mine:
            raise PrepareError(
                f"{type(scheduler).__name__} drives an optimizer that is not prepared: prepare that optimizer in the same call or before"
            )
        prepared = self._wishes.schedule(scheduler, mine)
        self.schedulers.append(prepared)
        return prepared

    def _prepare_loader(self, loader: DataLoader[Any], place: bool) -> PreparedLoader:
        for prepared in self.loaders:
            if prepared._given is loader:
                return prepared
        assert self._seed is not None, "the ranks have agreed on one"
        prepared = prepare_loader(
            loader,
            clock=self._run.clock,
            world=self._run.world,
            data_rank=self.strategy.data_rank,
            data_size=self.strategy.data_size,
            device=self._run.world.device,
            config=self._wishes.loading,
            seed=self._seed,
            device_placement=place,
        )
        self.loaders.append(prepared)
        return prepared

    def _agree(self, objects: Sequence[Any], more: Sequence[str] = ()) -> None:
        """All ranks brought the same things, or an error says who did not; and one data seed for all."""
        plan = self._run.plan
        decided = {"precision": plan.precision, "strategy": plan.strategy, "accumulation": plan.accumulation}
        mine = [f"{name} {choice.value}" for name, choice in decided.items()]
        mine += [
            line
            for line in describe_record(plan.settings)
            if line.split()[1].partition("=")[0] not in MAY_DIFFER
        ]
        mine += [line for record in self._wishes.records for line in describe_record(record)]
        mine += [line for o in objects for line in describe(o)]
        mine += more
        digest = hashlib.sha256("\n".join(mine).encode()).hexdigest()
        seen = self._run.world.gather_objects((digest, torch.initial_seed()))
        if self._seed is None:
            self._seed = seen[0][1]
            self._alike = len({s[1] for s in seen}) == 1
        if any(s[0] != seen[0][0] for s in seen):
            there = first_difference(self._run.world.gather_objects(mine))
            raise WorldError(
                f"the ranks prepare different things: {odd_one_out(there)}. All ranks must build and prepare the same objects, with the "
                "same settings and hyperparameters"
            )

    def _say_sums(self) -> None:
        choice = self._run.plan.accumulation
        words = ", their low-precision gradients summed in fp32"
        if choice.value > 1 and not choice.reason.endswith(words):
            self._run.plan = self._run.plan.replace(
                accumulation=Choice(choice.value, choice.reason + words, choice.source)
            )

    def _say_batch(self) -> None:
        for loader in self.loaders[:1]:
            steps = (
                f" × {self._run.clock.accumulation} accumulation" if self._run.clock.accumulation > 1 else ""
            )
            if loader.total_batch_size is not None:
                self.batch = (
                    f"{loader.size_line()}{steps} = {loader.total_batch_size * self._run.clock.accumulation}"
                )
                logger.info("batch: %s", self.batch)

    def routes(self, models: Sequence[nn.Module]) -> list[Route]:
        if not models:
            return [model.route for model in self.models]
        routes = []
        for model in models:
            found = [m.route for m in self.models if model is m.view or model is m.route.original]
            if not found:
                raise StepError(f"this {type(model).__name__} is not prepared: pass what prepare() returned")
            routes += found
        return routes

    def gradients(self) -> Iterator[torch.Tensor]:
        """All there are of prepared models' parameters, fp32 sums among them."""
        for model in self.models:
            yield from (p.grad for p in model.route.original.parameters() if p.grad is not None)
        yield from self.sums.gradients()

    def stepped(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What optimizers hold of `parameters`: their masters, with the gradients, where they have some."""
        for optimizer in self.optimizers_of([self.masters.get(id(p), p) for p in parameters]):
            optimizer.gather()
        return [self.masters.get(id(p), p) for p in parameters]

    def optimizers_of(self, parameters: Sequence[torch.Tensor]) -> list[PreparedOptimizer]:
        """The prepared optimizers that hold any of `parameters`, groups that were added later included."""
        wanted = {id(p) for p in parameters}
        return [
            o
            for o in self.optimizers
            if any(id(p) in wanted for group in o.param_groups for p in group["params"])
        ]

    def steppers(self, parameters: Sequence[torch.Tensor]) -> list[PreparedOptimizer] | None:
        """The optimizers that step just `parameters` of those that train or have gradients; None: there are none, or it is not worth it."""
        if not any(optimizer.engine.worth() for optimizer in self.optimizers):
            return None
        wanted = {id(p) for p in parameters if p.requires_grad or p.grad is not None}
        found = []
        for optimizer in self.optimizers:
            held = [
                id(p)
                for g in optimizer.param_groups
                for p in g["params"]
                if p.requires_grad or p.grad is not None
            ]
            mine = sum(p in wanted for p in held)
            if mine:
                if mine < len(held):
                    return None
                wanted.difference_update(held)
                found.append(optimizer)
        return None if wanted else found

    def follow_longest(self) -> None:
        """Copy states of optimizers, schedulers and the loss scale from the rank with the most updates to ranks that made fewer."""
        world = self._run.world
        updates = world.gather_objects([optimizer.updates for optimizer in self.optimizers])
        if all(made == updates[0] for made in updates):
            return
        source = max(range(world.size), key=lambda rank: sum(updates[rank]))
        parts = [*self.optimizers, *self.schedulers, self._scaler]
        states = [
            send_to_device(part.state_dict(), "cpu") if world.rank == source else None for part in parts
        ]
        world.broadcast_objects(states, source)
        for optimizer, made in zip(self.optimizers, updates[source]):
            optimizer.updates = made
            for _, master in optimizer.masters:
                master.detach().copy_(world.broadcast(master, source))
        if world.rank != source:
            for part, state in zip(parts, states):
                part.load_state_dict(state)

    def release(self) -> None:
        """Let go of everything. Views stay callable, each rank for itself; optimizers hold their parameters again."""
        for optimizer in self.optimizers:
            optimizer.release()
            vars(optimizer.given).pop("add_param_group", None)
        if self.replicas is not None:
            self.replicas.forget()
        self.sums.clear()
        for model in self.models:
            alone = self._precision.forward(model.route.original, self._run.world.device)
            model.route.module = self.strategy.release(model.route.module, alone)
        if self._compiling:
            self._compiling.undo()
        while self._undo:
            self._undo.pop()()
        for module, kind in self.converted:
            module.__class__ = kind  # a synchronised one waits for ranks that are gone
            module.process_group = None
        for held in (
            self.converted,
            self.models,
            self.optimizers,
            self.schedulers,
            self.loaders,
            self.owner,
            self.stepped_by,
            self._whose,
            self._raised,
        ):
            held.clear()
        self._fitting.forget()
