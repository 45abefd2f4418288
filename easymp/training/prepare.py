"""Prepare the objects that a script brings: check them, compare them over the ranks, wrap them, and keep them.

Models come first, since optimizers are checked against them; then optimizers, loaders, and schedulers, which follow optimizers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from .. import cuda, optim
from ..base.dtensor import follow, local
from ..base.pytree import send_to_device
from ..base.rng import diverge
from ..base.units import size
from ..data import PreparedLoader, SkippedLoader, UnpreparedCheck, prepare_loader
from ..distributed import World
from ..errors import PrepareError, RefusedError, StepError
from ..logging import get_logger
from ..options import DataLoaderConfiguration
from ..plan import AUTO
from ..precision import Scaler
from ..precision.policies import LOW, Float8Linear, forget_rounded, raise_weights, round_once
from ..protocols import Precision, Strategy, WrapContext
from ..strategies.batchnorm import batchnorms, convert_sync_batchnorm
from ..strategies.blocks import refuse_sparse
from ..strategies.meta_init import materialise
from ..strategies.single import hook_gradient, refuse_words
from ..strategies.transforms import (
    CompileOptions,
    Compiling,
    Offload,
    Recompute,
    can_compile,
    find_recomputed,
    recompute,
)
from .activations import Budget
from .memory import SPARE, AutoStrategy, first_batch
from .replicas import ADDED, Replicas, compare_prepared
from .state import Run
from .wrapper import Route, forward_methods, make_view

if TYPE_CHECKING:
    from ..optim import Masters
    from ..optim.engine import Engine
    from ..optim.optimizer import PreparedOptimizer, PreparedScheduler

logger = get_logger(__name__)

SUMMED = ", their low-precision gradients summed in fp32"


class PrepareOptions(NamedTuple):
    """The constructor's arguments about preparing; `schedule` makes a prepared scheduler, `records` must be the same on all ranks."""

    place: bool
    loading: DataLoaderConfiguration
    schedule: Callable[[Any, Sequence[PreparedOptimizer]], PreparedScheduler]
    strategy_options: bool = False  # whether some were given
    initialize: Callable[[nn.Module], None] | None = None
    recompute: Recompute | None = None
    compile: CompileOptions | None = None
    records: Sequence[Any] = ()
    keep: Callable[[], Any] | None = None  # see `Route`
    views: bool = False  # whether a model is never handed back itself


class Preparation:
    """All objects that one run has prepared.

    Attributes:
        strategy: spreads models; "auto" may take another one when the first models come.
        models, optimizers, schedulers, loaders: in the order they came; a model as the `Route` of its calls.
        owner: id of a prepared parameter → its name.
        stepped_by: id of a parameter → its optimizer.
        masters: id of a low-precision parameter → its fp32 master, where the precision has some.
        sums: fp32 sums of low-precision gradients over a window.
        batch: the arithmetic of the global batch, in words.
        converted: batch-norms that became synchronised ones, and the classes they had.
        replicas: compares parameters over the ranks; None on one rank, or where that is off.
        unprepared: looks at where the data comes from, until a backward pass has shown it.
        seed: of the data order and of ranks' random streams; the same on all ranks once something is prepared.
    """

    def __init__(
        self,
        run: Run,
        strategy: Strategy,
        precision: Precision,
        scaler: Scaler,
        options: PrepareOptions,
        no_sync: Callable[[nn.Module], AbstractContextManager[Any]],
    ) -> None:
        self._run, self._precision, self._scaler, self._options = run, precision, scaler, options
        self._no_sync, self.strategy = no_sync, strategy
        self._auto = AutoStrategy(run, precision, free=not options.strategy_options)
        self.models: list[Route] = []
        self.optimizers: list[PreparedOptimizer] = []
        self.schedulers: list[PreparedScheduler] = []
        self.loaders: list[PreparedLoader] = []
        self._done: dict[int, Any] = {}  # id of a user's object, and of the prepared one → the prepared one
        self.owner: dict[int, str] = {}
        self.stepped_by: dict[int, PreparedOptimizer] = {}
        self.masters: dict[int, Tensor] = {}
        self.sums = optim.Sums(self.masters)
        self.batch = ""
        self.unprepared: UnpreparedCheck | None = None
        self.converted: list[tuple[nn.Module, type]] = []
        self._raised: dict[int, torch.dtype] = {}  # id of a parameter → the dtype that it came in
        self._not_fused: dict[PreparedOptimizer, str | None] = {}  # why torch has no fused step for it
        self._compiling = Compiling(options.compile) if options.compile else None
        self._undo: list[Callable[[], None]] = []  # of changes to models in place, other than the strategy's
        self._told: list[str] = []  # about the weights, in the plan
        settings, which = run.plan.settings, options.recompute
        self._budget = Budget(run, which) if which and which.below is not None else None
        if settings.strategy != AUTO:
            self._check_words()
        if strategy.context_size > 1:
            words = f"{run.plan.strategy.reason}; {strategy.context_size} neighbouring processes share each sequence"
            self._refine("strategy", words)
        self._seeded = self._alike = settings.seed is not None  # alike: all ranks draw from one random stream
        self.seed = torch.initial_seed() if settings.seed is None else settings.seed
        self.replicas: Replicas | None = None
        if settings.replica_check and run.world.size > 1:
            held = (self.models, self.optimizers, self.owner)
            self.replicas = Replicas(run.world, settings.replica_check, *held)
            run.window.stepped.append(self.replicas.stepped)

    def prepare(
        self,
        objects: Sequence[Any],
        device_placement: Sequence[bool | None] | None,
        methods: str | Sequence[str] = (),
    ) -> list[Any]:
        """Prepare `objects`, and return them in the same order. Calls of `methods` of the models are treated as forward."""
        if device_placement is not None and len(device_placement) != len(objects):
            raise PrepareError(
                f"device_placement has {len(device_placement)} values for {len(objects)} objects: pass one for each"
            )
        asked, done = device_placement or [None] * len(objects), self._done
        models = {id(o): o for o in objects if isinstance(o, nn.Module) and id(o) not in done}
        new = list(models.values())
        named = dict(zip(models, forward_methods(new, methods)))
        self._check_models(new)
        seeds = [torch.initial_seed()]
        if self._run.world.size > 1:
            lines = [f"forward methods {names}" for names in named.values()]
            seeds = compare_prepared(self._run, objects, self._options.records, lines)
        if not self._seeded:
            self._seeded, self.seed, self._alike = True, seeds[0], len(set(seeds)) == 1
        given = [o for o in objects if isinstance(o, Optimizer)]
        plain = [o.optimizer if isinstance(o, optim.PreparedOptimizer) else o for o in given]
        if new:
            self._spread(new, plain, named, objects)
        ready = (PreparedLoader, SkippedLoader, optim.PreparedOptimizer, optim.PreparedScheduler, type(None))
        for kind, make in (
            (nn.Module, partial(self._prepare_model, optimizers=plain, named=named)),
            (Optimizer, self._prepare_optimizer),
            (DataLoader, self._prepare_loader),
            (object, self._prepare_scheduler),
        ):
            for item, place in zip(objects, asked):
                if isinstance(item, kind) and id(item) not in done:
                    where = self._options.place if place is None else place
                    done[id(item)] = item if isinstance(item, ready) else make(item, where)
        if new and self._alike:
            if self.strategy.data_rank:
                diverge(self.strategy.data_rank)  # ranks that share their data share its dropout
            self._alike = False
        strategy, window = self.strategy, self._run.window
        if strategy.data_size > 1 and not window.backwards:
            self.unprepared = UnpreparedCheck(self._run.world, strategy.data_rank, strategy.data_size)
        return [done[id(item)] for item in objects]

    def _refine(self, name: str, reason: str, value: Any = None) -> None:
        """Put another reason into the plan, and another value unless it is None."""
        plan = self._run.plan
        was = getattr(plan, name)
        self._run.plan = replace(
            plan, **{name: replace(was, value=was.value if value is None else value, reason=reason)}
        )

    # -- models

    def _check_models(self, models: Sequence[nn.Module]) -> None:
        owner = dict(self.owner)
        for model in models:
            kind = type(model).__name__
            if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
                raise PrepareError(
                    f"the model is already in a {kind}: pass its .module, the strategy does the wrapping"
                )
            for name, parameter in model.named_parameters():
                why = ""
                if isinstance(parameter, nn.UninitializedParameter):
                    why = "has no shape yet: call the model once on a batch before prepare(), so that its lazy layers are made"
                elif id(parameter) in owner:
                    why = f"was prepared before, as {owner[id(parameter)]!r}: prepare one module that holds both parts, once"
                if why:
                    raise PrepareError(f"parameter {name!r} of this {kind} {why}")
                owner[id(parameter)] = name

    def _spread(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        named: Mapping[int, Sequence[str]],
        objects: Sequence[Any],
    ) -> None:
        """Decide the strategy for `models`, and apply changes that every strategy shares, before it wraps them."""
        run, options = self._run, self._options
        if run.plan.settings.strategy == AUTO and run.world.size > 1:
            share = run.world.size if options.loading.split_batches else 1
            sample = first_batch(models, [o for o in objects if type(o) is DataLoader], share)
            self.strategy = self._auto.choose(models, optimizers, self.strategy, sample)
        elif run.plan.settings.strategy == AUTO:
            every = [*(route.original for route in self.models), *models]
            # An upper bound for any precision and usual optimizer; an estimate takes longer.
            most = sum(p.numel() * (8 * p.element_size() + 12) for model in every for p in model.parameters())
            if most > run.plan.memory * (1 - SPARE):
                steps = [*(o.given for o in self.optimizers), *optimizers]
                self._auto.look_alone(every, steps, self.strategy.name)
        strategy = self.strategy
        self._check_words()
        if strategy.only_forward and any(named.values()):
            raise RefusedError(
                f"forward_methods: strategy {strategy.name!r} {strategy.only_forward}. Call the model itself, or use 'ddp'"
            )
        if run.world.size > 1:
            if self.replicas is not None:
                self.replicas.follow(strategy)
            self._auto.reduce_early(models, optimizers, strategy, run.window.accumulation > 1)
            if run.plan.settings.convert_sync_batchnorm and strategy.data_size * strategy.context_size > 1:
                for model in models:
                    self.converted += [(module, type(module)) for module in batchnorms(model)]
                    convert_sync_batchnorm(model, strategy.data_group)
        which = options.recompute
        if which and which.below is None:
            parts = find_recomputed(models, which)
            self._undo.append(recompute(parts, which.selective))
            keeps = "inputs, matrix products and attention" if which.selective else "inputs only"
            words = f"{len(parts)} parts keep their {keeps} (`easymp estimate --input` counts bytes)"
            self._refine("activations", words)
        if self._compiling:  # recomputed parts are compiled, too
            for model in models:
                self._precision.decide(model)  # timing would compile the model in both
            if run.plan.compile is not None:  # not asked for, so left out where it cannot be
                models = [model for model in models if can_compile(model)]
                none = "no repeated blocks, or compiled already: compile=True compiles a whole model"
                if not models:
                    self._refine("compile", none, "no")
            self._compiling.blocks(models, strategy.sharded)

    def _check_words(self) -> None:
        """Raises RefusedError for a word that the strategy cannot run."""
        strategy, settings = self.strategy, self._run.plan.settings
        refuse_words(strategy, settings.activation_offload, settings.optimizer_in_backward)
        if self._budget is not None and strategy.no_offload and strategy.only_forward:
            raise RefusedError(
                f"activation_checkpointing by size cannot run under strategy {strategy.name!r}, where the activations of a rank are not "
                "those of the whole model: use activation_checkpointing='blocks'"
            )

    def _prepare_model(
        self,
        model: nn.Module,
        place: bool,
        optimizers: Sequence[Optimizer],
        named: Mapping[int, Sequence[str]],
    ) -> nn.Module:
        world, strategy, precision, options = self._run.world, self.strategy, self._precision, self._options
        settings, methods = self._run.plan.settings, named[id(model)]
        if precision.raises:
            self._raise_weights(model)
        if not strategy.sharded and any(t.is_meta for t in chain(model.parameters(), model.buffers())):
            materialise(model, world.device if place else torch.device("cpu"), options.initialize)
        first = offload = None
        early = settings.optimizer_in_backward
        if methods or self._budget:
            precision.decide(model)  # a timing would be one of forward, and before activations are counted
        if self._budget:
            how: Any = {"options": strategy.options, "optimizer_in_backward": early}
            need = self._auto.need(strategy.name, [model], optimizers, **how)
            first = self._budget.watch(model, precision, need.total, self._undo)
        if settings.activation_offload:
            offload = Offload(world.device)
            keeps = f"{self._run.plan.activations.reason}; " if options.recompute else ""  # type: ignore[union-attr]
            self._refine("activations", f"{keeps}what forward keeps is in pinned host memory until backward")
        compiling = (self._compiling.whole, True) if self._compiling else (lambda module: None, False)
        context = WrapContext(precision, place, options.initialize, *compiling, early)
        wrapped = strategy.wrap(model, optimizers, context)
        if precision.swaps and strategy.sharded:
            in_fp8 = len(wrapped.rounded)
            rest = f"gathered in bf16, and rounded for {precision.name} after each gather"
            words = f"shards of {in_fp8} weights in blocks rounded once an update and gathered in fp8; others {rest}"
            why = wrapped.unrounded and f": {wrapped.unrounded}"
            self._say_weights(words if in_fp8 else f"{rest}{why}")
        if world.size > 1:
            world.hurry_groups()
        if precision.masters or (strategy.sums and self._run.window.accumulation != 1):
            why = "gradients of low-precision parameters are summed in fp32, dense ones only"
            refuse_sparse(model, why, "keep its weights in fp32", narrow=True)
        calls = (world.blame, partial(self._no_sync, model), methods)
        asks = options.views or (options.keep is not None and settings.nonfinite is not None)
        watched = (first, offload, options.keep, asks)
        route = make_view(*(model, wrapped, *calls), strategy.no_double_backward, strategy.sharded, *watched)
        for parameter in model.parameters() if early else ():
            if parameter.is_floating_point() or parameter.is_complex():
                self._undo.append(hook_gradient(parameter, self._gradient_done).remove)
        self.models.append(route)
        if precision.rounds:
            own = [m for m in model.modules() if isinstance(m, Float8Linear) and "weight" in m._parameters]
            if not strategy.sharded:
                route.before = partial(round_once, own)
            layers = wrapped.rounded if strategy.sharded else own
            forget = partial(forget_rounded, layers)
            self._run.window.stepped.append(forget)
            self._undo += [partial(self._run.window.stepped.remove, forget), partial(forget_rounded, layers)]
            # Of optimizers that are not prepared.
            self._undo.append(register_optimizer_step_post_hook(forget).remove)
        if route.keep is not None and route.view is not model:
            self._run.window.stepped.append(route.forget)
            self._undo.append(partial(self._run.window.stepped.remove, route.forget))
        self._done[id(route.view)] = route.view
        self.owner.update((id(p), name) for name, p in model.named_parameters())
        low = self.sums.on or any(p.requires_grad and p.dtype in LOW for p in model.parameters())
        if strategy.sums and low:
            every = (p for one in self.models for p in one.original.parameters())
            self.sums.watch([p for p in every if p.requires_grad])
            choice = self._run.plan.accumulation
            if choice.value > 1 and not choice.reason.endswith(SUMMED):
                self._refine("accumulation", choice.reason + SUMMED)
        return route.view

    def _gradient_done(self, parameter: Tensor) -> None:
        """In backward: step the parameters whose gradients are averaged by now."""
        ready: dict[PreparedOptimizer, list[Tensor]] = {}
        for one in self.strategy.reduced(parameter):
            if id(one) in self.stepped_by and one.grad is not None:
                ready.setdefault(self.stepped_by[id(one)], []).append(one)
        for optimizer, parameters in ready.items():
            optimizer.step_now(parameters)

    def _raise_weights(self, model: nn.Module) -> None:
        raised = raise_weights(model)
        if raised:
            self._raised.update((id(p), dtype) for p, dtype in raised)
            kinds = " and ".join(sorted({str(dtype).removeprefix("torch.") for _, dtype in raised}))
            number = f"{sum(p.numel() for p, _ in raised):,} trainable parameters"
            self._say_weights(f"{number} of {type(model).__name__} raised from {kinds}")

    def _say_weights(self, words: str) -> None:
        self._told.append(words)
        self._refine("weights", "; ".join(dict.fromkeys(self._told)))
        logger.info("weights: %s", words)

    # -- optimizers

    def _prepare_optimizer(self, optimizer: Optimizer, place: bool) -> PreparedOptimizer:
        settings, strategy, kind = self._run.plan.settings, self.strategy, type(optimizer).__name__
        originals = [route.original for route in self.models]
        remedy = "prepare the model in the same call or before, and build the optimizer from that model's parameters"
        for g, group in enumerate(optimizer.param_groups):
            self._check_free(f"{kind} holds", f" (param group {g})", group["params"], remedy)
        own = isinstance(optimizer, optim.FusedOptimizer)  # chooses its step itself
        if own and optimizer.options.ema_decay is not None and settings.ema_decay is not None:
            raise PrepareError(
                f"ema_decay was given to {kind} and to the Accelerator, which would keep one average twice: give it to one"
            )
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if optimizer.state:
            follow(optimizer, self._raised)
        masters, why_not = None, None
        if self._precision.masters or any(p.dtype in LOW for p in held):
            masters = self._masters_for(optimizer, held)
            self._keep_frozen(optimizer, held)
        if own and not settings.fused:
            optimizer.use_plain_torch()
        elif settings.fused and not own:  # before it is spread: the strategy's optimizer has another class
            why_not = optim.fuse(optimizer, originals)
        stepped, counting = strategy.spread(optimizer), strategy.counting
        if isinstance(stepped, optim.FusedOptimizer) and counting.add is not None:
            stepped.counting = counting
        early, world, scaler = settings.optimizer_in_backward, self._run.world, self._scaler
        how: Any = (settings.fused and not early, settings.ema_decay, masters, self._gave_way, scaler.enabled)
        engine = optim.Engine(stepped, counting, *how)
        if world.size > 1 and world.device.type == "cuda":
            same_kernels(world, stepped, engine)
        shared = (self._run.window, scaler, optimizer, masters, self.sums, engine)
        prepared = optim.PreparedOptimizer(stepped, *shared)
        if early:
            prepared.step_in_backward(world.size)
        self.stepped_by.update((id(p), prepared) for p in held)
        vars(optimizer)["add_param_group"] = partial(self._add_param_group, optimizer, prepared)
        if world.size > 1:
            prepared.cleared = self._drop
        self.optimizers.append(prepared)
        scaler.sharers = len(self.optimizers)
        if settings.fused:
            self._not_fused[prepared] = why_not
            self._say_steps()
        if early:
            how = {"optimizers": [], "options": strategy.options}
            whole, few = (
                self._auto.need(strategy.name, originals, **how, optimizer_in_backward=word).gradients
                for word in (False, True)
            )
            words = f"each parameter is stepped in backward: {size(few)} of gradients at once instead of {size(whole)}"
            self._refine("optimizer", f"{self._run.plan.optimizer.reason}; {words}")
        return prepared

    def _drop(self, parameters: Callable[[], set[int]]) -> None:
        """Drop what the strategy keeps of these parameters' gradients beside ``.grad``."""
        for route in self.models:
            self.strategy.drop(route.module, parameters)

    def _masters_for(self, optimizer: Optimizer, held: Sequence[Tensor]) -> Masters | None:
        """Make fp32 masters of low-precision weights, unless the optimizer rounds stochastically, or the precision uses neither.

        Raises:
            PrepareError: masters are needed, and the strategy does not support them.
        """
        policy, kind = self._precision, type(optimizer).__name__
        low = [p for p in held if p.requires_grad and p.dtype in LOW]
        if not policy.masters and not (low and policy.keeps_updates):
            return None
        number = f"{sum(p.numel() for p in low):,} low-precision parameters"
        if not policy.masters:
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

    def _keep_frozen(self, optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
        """Refuse steps that find one of the low-precision `parameters` unfrozen, which are frozen now and keep their dtype."""
        frozen = [p for p in parameters if not p.requires_grad and p.dtype in LOW]
        if frozen and not self._precision.masters and self._precision.keeps_updates:

            def check(*_: Any) -> None:
                self._check_wide(frozen)

            optim.indifferent.add(check)
            self._undo.append(optimizer.register_step_pre_hook(check).remove)

    def _check_wide(self, parameters: Iterable[Tensor]) -> None:
        """Refuse low-precision parameters that were unfrozen after `prepare`, and so have neither fp32 values nor masters."""
        for parameter in parameters:
            if parameter.requires_grad and parameter.dtype in LOW:
                raise StepError(
                    f"{self.owner.get(id(parameter), 'a parameter')!r} trains now, but was frozen or in no optimizer when it was prepared, "
                    f"and stayed {parameter.dtype}, where small updates are lost: call requires_grad_(True) and give it to the optimizer "
                    "before prepare() (free_memory() lets you prepare again)"
                )

    def _check_free(self, holds: str, where: str, parameters: Iterable[Tensor], remedy: str) -> None:
        """Check that `parameters` belong to prepared models, and that no prepared optimizer steps them."""
        for parameter in parameters:
            if id(parameter) not in self.owner:
                shape = tuple(parameter.shape)
                raise PrepareError(
                    f"{holds} a parameter of shape {shape}{where} that belongs to no prepared model: {remedy}"
                )
            if id(parameter) in self.stepped_by:
                raise PrepareError(
                    f"{holds} parameter {self.owner[id(parameter)]!r}, which another prepared optimizer steps already: give each parameter "
                    "to one optimizer (free_memory() lets go of the old ones)"
                )

    def _add_param_group(
        self, optimizer: Optimizer, prepared: PreparedOptimizer, group: dict[str, Any]
    ) -> None:
        """Replaces `add_param_group` of the user's optimizer, and calls it."""
        items = group["params"]
        if not isinstance(items, (Tensor, set)):  # torch refuses a set, which has no order
            items = group["params"] = list(items)
        several = [items] if isinstance(items, Tensor) else items
        added = [p[1] if isinstance(p, tuple) else p for p in several]
        if self._run.world.size == 1:  # nothing is averaged, so parameters that models got since then will do
            for route in self.models:
                self.owner.update((id(p), name) for name, p in route.original.named_parameters())
        self._check_free(f"{type(optimizer).__name__}.add_param_group got", "", added, ADDED)
        own = isinstance(optimizer, optim.FusedOptimizer)
        rounds = own and optimizer.options.stochastic_rounding is not False
        if self._precision.keeps_updates and not prepared.has_masters and not rounds:
            self._check_wide(added)
        type(optimizer).add_param_group(optimizer, group)
        self._keep_frozen(optimizer, added)
        prepared.take_group()
        self.stepped_by.update((id(p), prepared) for p in added)
        if self.replicas is not None:
            self.replicas.begin_again(prepared)

    def _say_steps(self) -> None:
        """Put into the plan which step runs of each optimizer, and why."""
        said: dict[str, list[str]] = {"CuPy": [], "fused": [], "as given": []}
        for optimizer, why_not in self._not_fused.items():
            engine, given, kind = optimizer.engine, optimizer.given, type(optimizer.given).__name__
            way, reason = "as given" if why_not else "fused", why_not or f"torch's fused {kind}"
            if engine.kernels is not None:
                way, reason = "CuPy", engine.reason
            elif isinstance(given, optim.FusedOptimizer):
                way = "CuPy" if given.engine.kernels else "fused"
                reason = f"easymp's {kind} by {given.engine.name}: {given.engine.reason}"
            elif engine.reason and self._run.world.device.type == "cuda":
                reason = f"{reason}: {engine.reason}"
            said[way].append(reason)
        reasons = dict.fromkeys(chain.from_iterable(said.values()))
        self._refine("optimizer", "; ".join(reasons), ", ".join(filter(said.get, said)))

    def _gave_way(self, reason: str) -> None:
        """Called when kernels fail, and torch steps from now on."""
        cuda.warn_once(reason)
        self._say_steps()

    # -- schedulers and loaders

    def _prepare_scheduler(self, scheduler: Any, place: bool) -> PreparedScheduler:
        kind, drives = type(scheduler).__name__, getattr(scheduler, "optimizer", None)
        if not callable(getattr(scheduler, "step", None)) or not hasattr(scheduler, "state_dict"):
            raise PrepareError(
                f"prepare() got a {kind}, which is not a Module, Optimizer, scheduler or DataLoader: leave it out (a data set goes into a "
                "DataLoader first)"
            )
        mine = [o for o in self.optimizers if drives is None or drives is o or drives is o.given]
        if not mine:
            raise PrepareError(
                f"{kind} drives an optimizer that is not prepared: prepare that optimizer in the same call or before"
            )
        self.schedulers.append(self._options.schedule(scheduler, mine))
        return self.schedulers[-1]

    def _prepare_loader(self, loader: DataLoader[Any], place: bool) -> PreparedLoader:
        run, share = self._run, (self.strategy.data_rank, self.strategy.data_size)
        how = (self._options.loading, self.seed, place)
        prepared = prepare_loader(loader, run.window, run.world, *share, *how)
        self.loaders.append(prepared)
        if len(self.loaders) == 1 and prepared.batch_size is not None:
            self.batch = prepared.batch_line(run.window.accumulation)
            if logger.isEnabledFor(logging.INFO):
                logger.info("batch: %s", self.batch)
        return prepared

    # -- for the step

    def routes(self, models: Sequence[nn.Module]) -> list[Route]:
        """The routes of `models`, or of all prepared ones."""
        if not models:
            return self.models[:]
        routes = {id(model): route for route in self.models for model in (route.view, route.original)}
        for model in models:
            if id(model) not in routes:
                raise StepError(f"this {type(model).__name__} is not prepared: pass what prepare() returned")
        return [routes[id(model)] for model in models]

    def gradients(self) -> Iterator[Tensor]:
        """All gradients of prepared models' parameters, fp32 sums among them."""
        for route in self.models:
            yield from (p.grad for p in route.original.parameters() if p.grad is not None)
        yield from self.sums.gradients()

    def look_at_data(self, check: UnpreparedCheck) -> None:
        """Say, in the plan or once as a warning, that the data of several ranks comes from a loader that is not prepared."""
        run = self._run
        if run.plan.data is not None:
            self.unprepared = check if check.look_again() else None
        elif run.window.reading is not None:
            self.unprepared = None
        else:
            run.plan = replace(run.plan, data=check.begin())

    def stepped(self, parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
        """`parameters`, or their fp32 masters with the gradients, as optimizers hold them."""
        chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not self.masters:
            return chosen
        held = [self.masters.get(id(p), p) for p in chosen]
        for optimizer in self.optimizers_of(held):
            optimizer.gather()
        return held

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Divide the gradients of `optimizers`, prepared or not, by the loss scale in memory, and clip them as asked so far."""
        for optimizer in optimizers:
            if isinstance(optimizer, optim.PreparedOptimizer):
                optimizer.apply_clip()
                optimizer.gather(in_memory=True)
                optimizer = optimizer.optimizer
            self._scaler.ensure_unscaled(optimizer)

    def unscaled(self, parameters: list[Tensor]) -> list[Tensor]:
        """`parameters`, after their gradients were unscaled and clipped in memory as asked so far."""
        left = any(optimizer.turn.clip is not None for optimizer in self.optimizers)
        if self._scaler.enabled or self.masters or left:
            self.unscale(self.optimizers_of(parameters))
        return parameters

    def clamp(self, parameters: list[Tensor], most: float) -> None:
        """Clamp every element of the gradients to [-most, most]."""
        grads = []
        for parameter in self.unscaled(parameters):
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()  # so that a row of several parts is clamped whole
                grads.append(parameter.grad._values())
            elif parameter.grad is not None:
                grads.append(local(parameter.grad))
        if grads:
            torch._foreach_clamp_min_(grads, -most)
            torch._foreach_clamp_max_(grads, most)

    def optimizers_of(self, parameters: Sequence[Tensor]) -> list[PreparedOptimizer]:
        """The prepared optimizers that hold any of `parameters`, groups that were added later included."""
        wanted = {id(p) for p in parameters}
        return [
            o for o in self.optimizers if any(id(p) in wanted for g in o.param_groups for p in g["params"])
        ]

    def steppers(self, parameters: Sequence[Tensor]) -> list[PreparedOptimizer] | None:
        """The optimizers that together step exactly `parameters`; None if there are none, or if a clip inside the step gains nothing."""
        if not any(optimizer.engine.worth() for optimizer in self.optimizers):
            return None
        wanted = {id(p) for p in parameters if p.requires_grad or p.grad is not None}
        found = []
        for optimizer in self.optimizers:
            held = (p for g in optimizer.param_groups for p in g["params"])
            mine = {id(p) for p in held if p.requires_grad or p.grad is not None}
            if mine & wanted:
                if not mine <= wanted:
                    return None
                wanted -= mine
                found.append(optimizer)
        return None if wanted else found

    def not_compared(self) -> AbstractContextManager[None]:
        """A context in which the ranks may differ in parameters and in the number of updates."""
        return nullcontext() if self.replicas is None else self.replicas.pause()

    @contextmanager
    def join(self, models: Sequence[nn.Module], even_batches: bool | None) -> Iterator[None]:
        """A context in which ranks may run out of batches at different times; at its end they follow the one with the most updates."""
        if self.converted:
            raise RefusedError(
                "join_uneven_inputs with convert_sync_batchnorm: every forward needs the statistics of all ranks, those that are done "
                "included. Leave convert_sync_batchnorm out, or keep even_batches=True and do not join"
            )
        if self._run.window.accumulation != 1 and self._run.world.size > 1:
            raise RefusedError(
                "join_uneven_inputs with gradient accumulation: a rank's last batch ends its window, in the middle of the windows of ranks "
                "that have more batches. Keep even_batches=True, or set gradient_accumulation_steps=1"
            )
        before = [(loader, loader.even_batches) for loader in self.loaders if even_batches is not None]
        for loader, _ in before:
            loader.even_batches = even_batches
        # Ranks that are done do not take part; gradients are the same on those that are not.
        self._scaler.agree = False
        try:
            with self.not_compared(), self.strategy.join([r.module for r in self.routes(models)]):
                yield
            self._follow_longest()
        finally:
            self._scaler.agree = True
            for loader, even in before:
                loader.even_batches = even

    def _follow_longest(self) -> None:
        """Copy states of optimizers, schedulers and the loss scale from the rank with the most updates to ranks that made fewer."""
        world = self._run.world
        updates = world.gather_objects([optimizer.updates for optimizer in self.optimizers])
        if all(made == updates[0] for made in updates):
            return
        source = max(range(world.size), key=lambda rank: sum(updates[rank]))
        parts = [*self.optimizers, *self.schedulers, self._scaler]
        states: list[Any] = [None] * len(parts)
        if world.rank == source:
            states = [send_to_device(part.state_dict(), "cpu") for part in parts]
        world.broadcast_objects(states, source)
        for optimizer, made in zip(self.optimizers, updates[source]):
            optimizer.updates = made
            for _, master in optimizer.masters:
                master.detach().copy_(world.broadcast(master, source))
        if world.rank != source:
            for part, state in zip(parts, states):
                part.load_state_dict(state)

    def release(self) -> None:
        """Release everything. Views stay callable on each rank alone; optimizers hold their parameters again."""
        for optimizer in self.optimizers:
            optimizer.release()
            vars(optimizer.given).pop("add_param_group", None)
        if self.replicas is not None:
            self.replicas.forget()
        self.sums.clear()
        for route in self.models:
            alone = self._precision.forward(route.original, self._run.world.device)
            route.module = self.strategy.release(route.module, alone)
        if self._compiling:
            self._compiling.undo()
        while self._undo:
            self._undo.pop()()
        for module, kind in self.converted:
            module.__class__ = kind  # a synchronised one waits for ranks that are gone
            module.process_group = None
        held = (self.converted, self.models, self.optimizers, self.schedulers, self.loaders)
        known = (self.owner, self.stepped_by, self._done, self._not_fused, self._raised)
        for content in (*held, *known):
            content.clear()  # type: ignore[attr-defined]
        self._auto.needs = None
        if self._budget:
            self._budget.taken = 0


def same_kernels(world: World, stepped: Optimizer, engine: Engine) -> None:
    """Run easymp's kernels on all ranks or on none, so that all ranks make the same collectives for gradient norms."""
    own = stepped if isinstance(stepped, optim.FusedOptimizer) else None
    here = (engine if own is None else own.engine).kernels is not None
    if world.any(not here) and here:
        reason = "our kernels do not run on all ranks"
        if own is not None:
            own.do_without(reason)
        else:
            engine.give_way(reason)
