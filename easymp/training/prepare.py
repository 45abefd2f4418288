"""Prepare the objects that a script brings: check them, compare them over the ranks, wrap them, and keep them.

Models come first, since optimizers are checked against them; then optimizers, loaders, and schedulers, which follow
optimizers.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from .. import conflicts, cuda, optim
from ..base.accumulation import MicroStep, Phase
from ..base.dtensor import follow, local
from ..base.parts import Part
from ..base.pytree import send_to_device
from ..base.rng import diverge
from ..data import PreparedLoader, SkippedLoader, prepare_loader
from ..distributed import World
from ..errors import PrepareError, RefusedError, StepError
from ..logging import get_logger
from ..options import DataLoaderConfiguration
from ..plan import AUTO
from ..precision import Scaler
from ..precision.policies import LOW, raise_weights
from ..protocols import SMALL_EPS, UNROUNDED, Precision, Strategy, WrapContext
from ..strategies.batchnorm import batchnorms, convert_sync_batchnorm
from ..strategies.blocks import refuse_sparse
from ..strategies.meta_init import materialise
from ..strategies.transforms import CompileOptions, Compiling, can_compile
from .compare import compare_prepared
from .memory import AutoStrategy, Memory
from .state import Run
from .wrapper import Route, forward_methods, make_view

if TYPE_CHECKING:
    from ..optim import Masters
    from ..optim.engine import Engine
    from ..optim.optimizer import PreparedOptimizer, PreparedScheduler

logger = get_logger(__name__)

IN_FP32 = ", their low-precision gradients summed in fp32"
SUMMED_DENSE = "gradients of low-precision parameters are summed in fp32, dense ones only"
# What `prepare` hands back as it is.
PREPARED = (PreparedLoader, SkippedLoader, optim.PreparedOptimizer, optim.PreparedScheduler, type(None))
ADD_BEFORE_PREPARE = "add it to the model before prepare(), or call free_memory() and prepare model and optimizer anew"


class PrepareOptions(NamedTuple):
    """How objects are prepared: what the settings say, and what the migration layers change."""

    device_placement: bool
    dataloader_config: DataLoaderConfiguration
    has_strategy_options: bool = False
    initialize: Callable[[nn.Module], object] | None = None
    compile: CompileOptions | None = None
    records: Sequence[Any] = ()  # records of options, which must be the same on all ranks
    always_views: bool = False  # whether a model is never handed back itself
    make_loader: Callable[..., PreparedLoader] = prepare_loader
    make_scheduler: Callable[..., PreparedScheduler] = optim.PreparedScheduler
    diverge: bool = True  # whether each rank gets random streams of its own, if all ranks share one


class Identity(NamedTuple):
    """What tells a model from others of the same shape, in every run that makes it in the same way."""

    modules: str  # class, and a digest of the names and classes of its modules
    first_weights: str  # a digest of some values of its parameters before it was prepared


def identity(model: nn.Module) -> Identity:
    """The identity of a model that is not prepared yet."""
    modules = repr([(name, type(module).__name__) for name, module in model.named_modules()])
    weights = hashlib.sha1(usedforsecurity=False)
    for parameter in islice(model.parameters(), 64):
        values = parameter.data
        if type(values) is Tensor and not values.is_meta and values.layout is torch.strided:
            weights.update(repr(values.flatten()[:8].tolist()).encode())
    digest = hashlib.sha1(modules.encode(), usedforsecurity=False).hexdigest()[:8]
    return Identity(f"{type(model).__name__} {digest}", weights.hexdigest()[:8])


class Preparation:
    """All objects that one run has prepared.

    Attributes:
        strategy: spreads models; "auto" may take another one when the first models come.
        models, optimizers, schedulers, loaders: in the order they came; a model as the `Route` of its calls.
        owner: id of a prepared parameter → its name.
        identities: id of a model → its identity.
        stepped_by: id of a parameter → its optimizer.
        masters: id of a low-precision parameter → its fp32 master, where the precision has some.
        sums: fp32 sums of low-precision gradients over a window.
        batch: the arithmetic of the global batch, as text.
        converted: batch-norms that became synchronised ones, and the classes they had.
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
        self._auto = AutoStrategy(run, precision, free=not options.has_strategy_options)
        self.models: list[Route] = []
        self.optimizers: list[PreparedOptimizer] = []
        self.schedulers: list[PreparedScheduler] = []
        self.loaders: list[PreparedLoader] = []
        self._prepared_by_id: dict[int, Any] = {}  # id of a user's object, and of the prepared one → the prepared one
        self.owner: dict[int, str] = {}
        self.identities: dict[int, Identity] = {}
        self.stepped_by: dict[int, PreparedOptimizer] = {}
        self.masters: dict[int, Tensor] = {}
        self.sums = optim.Sums(self.masters)
        self.batch = ""
        self.converted: list[tuple[nn.Module, type]] = []
        self._raised: dict[int, torch.dtype] = {}  # id of a parameter → the dtype that it came in
        self._why_not_fused: dict[PreparedOptimizer, str | None] = {}  # why torch has no fused step for it
        self._compiling = Compiling(options.compile) if options.compile else None
        self._removals: list[Callable[[], None]] = []  # of hooks, and of the check of unprepared optimizers
        self._refuses_unprepared = False
        self._watches = False  # gradients after a backward, to refuse changes; decided at each backward
        self._always_watches = False
        self._plain_micro_step = MicroStep(run.window)
        self._sums_window = False  # low-precision gradients are summed in fp32; decided at each backward
        self._weights_notes: list[str] = []  # in the plan
        settings = run.plan.settings
        run.find_refused(strategy)
        reference = weakref.ref(run)
        # The window belongs to the run, so it holds the run weakly.
        run.window.refuse = lambda *words: reference().refuse(*words)  # type: ignore[union-attr]
        if strategy.context_size > 1:
            shared = f"{strategy.context_size} neighbouring processes share each sequence"
            run.refine("strategy", f"{run.plan.strategy.reason}; {shared}")
        # Whether the seed is the same on all ranks; whether all ranks draw from one random stream.
        self._has_seed = self._same_streams = settings.seed is not None
        self.seed = torch.initial_seed() if settings.seed is None else settings.seed

    def prepare(
        self, objects: Sequence[Any], device_placement: Sequence[bool | None] | None, methods: str | Sequence[str] = ()
    ) -> list[Any]:
        """Prepare `objects`, and return them in the same order. Calls of `methods` of the models count as forward."""
        if device_placement is not None and len(device_placement) != len(objects):
            raise PrepareError(
                f"device_placement has {len(device_placement)} values for {len(objects)} objects: pass one for each"
            )
        run, prepared_by_id = self._run, self._prepared_by_id
        unique_models = dict.fromkeys(o for o in objects if isinstance(o, nn.Module))
        models = [model for model in unique_models if id(model) not in prepared_by_id]
        self.identities.update((id(model), identity(model)) for model in models)
        methods_of = dict(zip(map(id, models), forward_methods(models, methods)))
        self._check_models(models)
        seeds = [torch.initial_seed()]
        if run.world.size > 1:
            lines = [f"forward methods {names}" for names in methods_of.values()]
            seeds = compare_prepared(run, objects, self._options.records, lines)
        if not self._has_seed:  # take rank 0's
            self._has_seed, self.seed, self._same_streams = True, seeds[0], len(set(seeds)) == 1
        optimizers = [
            o.optimizer if isinstance(o, optim.PreparedOptimizer) else o for o in objects if isinstance(o, Optimizer)
        ]
        if models:
            self._change_models(models, optimizers, any(methods_of.values()))
        default = self._options.device_placement
        placements = [default if moved is None else moved for moved in device_placement or [None] * len(objects)]
        prepare_model = partial(self._prepare_model, optimizers=optimizers, methods_of=methods_of)
        new: list[Any] = []
        steps: tuple[tuple[type, Callable[[Any, bool], Any]], ...] = (
            (nn.Module, prepare_model),
            (Optimizer, self._prepare_optimizer),
            (DataLoader, self._prepare_loader),
            (object, self._prepare_scheduler),
        )
        for kind, prepare_item in steps:
            for item, placement in zip(objects, placements):
                if isinstance(item, kind) and id(item) not in prepared_by_id:
                    prepared_by_id[id(item)] = item if isinstance(item, PREPARED) else prepare_item(item, placement)
                    new.append(prepared_by_id[id(item)])
        self._always_watches = self._shares_gradients or "change of gradients" in run.refused
        if models and self._same_streams:
            if self.strategy.data_rank and self._options.diverge:
                diverge(self.strategy.data_rank)  # ranks that share their data share its dropout
            self._same_streams = False
        for notify in run.parts.prepared:
            notify(new)
        return [prepared_by_id[id(item)] for item in objects]

    # -- models

    def _check_models(self, models: Sequence[nn.Module]) -> None:
        owner = dict(self.owner)
        for model in models:
            kind = type(model).__name__
            if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
                raise PrepareError(f"the model is already in a {kind}: pass its .module, and the strategy wraps it")
            for name, parameter in model.named_parameters():
                fault = ""
                if isinstance(parameter, nn.UninitializedParameter):
                    fault = "has no shape yet: call the model once on a batch before prepare(), "
                    fault += "so that its lazy layers are made"
                elif id(parameter) in owner:
                    fault = f"was prepared before, as {owner[id(parameter)]!r}: "
                    fault += "prepare one module that holds both parts, once"
                if fault:
                    raise PrepareError(f"parameter {name!r} of this {kind} {fault}")
                owner[id(parameter)] = name

    def _change_models(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], has_methods: bool) -> None:
        """Choose the strategy, if that is "auto", and apply changes that every strategy shares, before it wraps."""
        run = self._run
        if run.plan.settings.strategy == AUTO and run.world.size > 1:
            self.strategy = self._auto.choose(models, optimizers, self.strategy)
            run.find_refused(self.strategy)
        strategy = self.strategy
        if has_methods:
            run.refuse("forward_methods")
        if run.world.size > 1:
            self._auto.reduce_early(models, optimizers, strategy, run.window.accumulation > 1)
            if run.plan.settings.convert_sync_batchnorm and strategy.data_size * strategy.context_size > 1:
                for model in models:
                    self.converted += [(module, type(module)) for module in batchnorms(model)]
                    convert_sync_batchnorm(model, strategy.data_group)
        for notify in run.parts.preparing:
            notify(models, optimizers)
        if self._compiling:
            if run.plan.compile is not None:  # not asked for, so left out where it cannot be
                models = [model for model in models if can_compile(model)]
                if not models:
                    reason = "no repeated blocks, or compiled already: compile=True compiles a whole model"
                    run.refine("compile", reason, "no")
            self._compiling.blocks(models, strategy.sharded)

    def _prepare_model(
        self,
        model: nn.Module,
        placement: bool,
        optimizers: Sequence[Optimizer],
        methods_of: Mapping[int, Sequence[str]],
    ) -> nn.Module:
        world, strategy, options, parts = self._run.world, self.strategy, self._options, self._run.parts
        precision = self._precision
        raised = raise_weights(model) if precision.raises else ()
        if raised:
            self._raised.update((id(p), dtype) for p, dtype in raised)
            dtypes = " and ".join(sorted({str(dtype).removeprefix("torch.") for _, dtype in raised}))
            number = f"{sum(p.numel() for p, _ in raised):,} trainable parameters"
            self._note_weights(f"{number} of {type(model).__name__} raised from {dtypes}")
        if not strategy.sharded and any(t.is_meta for t in chain(model.parameters(), model.buffers())):
            materialise(model, world.device if placement else torch.device("cpu"), options.initialize)
        context = WrapContext(precision, placement, options.initialize)
        if self._compiling:
            context = context._replace(compile=self._compiling.compile_model)
        wrapped = strategy.wrap(model, optimizers, context)
        if precision.swaps and strategy.sharded:
            self._note_weights(f"gathered in bf16, and rounded for {precision.name} after each gather")
        if world.size > 1:
            world.set_group_timeouts()
        if precision.masters or (strategy.sums and self._run.window.accumulation != 1):
            refuse_sparse(model, SUMMED_DENSE, "keep its weights in fp32", narrow=True)
        refusal = self._run.refused.get("create_graph=True", "")
        route = Route(model, wrapped, partial(self._no_sync, model), world.blame, parts, refusal, model)
        watching = [part for part in parts.all if type(part).forward is not Part.forward]
        watched = bool(parts.forward) and any(part.needs_views for part in watching)
        make_view(route, methods_of[id(model)], strategy.sharded, options.always_views or watched)
        self.models.append(route)
        self._prepared_by_id[id(route.view)] = route.view
        self.owner.update((id(p), name) for name, p in model.named_parameters())
        if strategy.sums and (self.sums.on or any(p.requires_grad and p.dtype in LOW for p in model.parameters())):
            self._sum_in_fp32()
        return route.view

    def _sum_in_fp32(self) -> None:
        """Sum all models' gradients in fp32 over a window, since one of them has low-precision parameters."""
        all_parameters = (p for route in self.models for p in route.original.parameters())
        self.sums.watch([p for p in all_parameters if p.requires_grad])
        choice = self._run.plan.accumulation
        if choice.value > 1 and not choice.reason.endswith(IN_FP32):
            self._run.refine("accumulation", choice.reason + IN_FP32)

    def _note_weights(self, note: str) -> None:
        self._weights_notes.append(note)
        self._run.refine("weights", "; ".join(dict.fromkeys(self._weights_notes)))
        logger.info("weights: %s", note)

    def memory_need(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer] = (), **options: Any) -> Memory:
        """Memory that a rank needs for `models` under the strategy, without activations; `options` of `estimate`."""
        options.setdefault("optimizer_in_backward", any(part.steps_in_backward for part in self._run.parts.all))
        return self._auto.need(self.strategy.name, models, optimizers, self.strategy.options, **options)

    # -- optimizers

    def _prepare_optimizer(self, optimizer: Optimizer, placement: bool) -> PreparedOptimizer:
        settings, strategy, kind = self._run.plan.settings, self.strategy, type(optimizer).__name__
        remedy = "prepare the model in the same call or before, and build the optimizer from that model's parameters"
        for number, group in enumerate(optimizer.param_groups):
            self._check_unclaimed(f"{kind} holds", f" (param group {number})", group["params"], remedy)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        rows = self._precision.conflicts
        small_eps = (group["eps"] < 1e-4 for group in optimizer.param_groups)
        if rows and isinstance(optimizer, torch.optim.Adam) and any(small_eps):
            conflicts.check({self._precision.name, SMALL_EPS}, rows)
        if optimizer.state:
            follow(optimizer, self._raised)
        masters = None
        if self._precision.masters or any(p.dtype in LOW for p in parameters):
            masters = self._masters_for(optimizer, parameters)
            self._keep_frozen(optimizer, parameters)
        why_not_fused = None
        if isinstance(optimizer, optim.OwnOptimizer) and not settings.fused:
            for group in optimizer.param_groups:  # those of Apex's layer have an engine of their own
                group["fused"] = group.get("fused") or False
        elif settings.fused and not isinstance(optimizer, optim.OwnOptimizer):
            why_not_fused = optim.fuse(optimizer, [route.original for route in self.models])
        stepping, counting, world = strategy.spread(optimizer), strategy.counting, self._run.world
        if isinstance(stepping, optim.OwnOptimizer) and counting.add is not None:
            stepping.counting = counting
        in_backward = any(part.steps_in_backward for part in self._run.parts.all)
        rounding = (torch.bfloat16, (settings.seed or 0) % 2**63) if settings.stochastic_rounding else ()
        engine = optim.Engine(
            stepping,
            optim.EngineOptions(settings.ema_decay, *rounding),
            counting,
            free=settings.fused and not in_backward,
            masters=masters,
            failed=self._use_torch,
            scaled=self._scaler.enabled,
        )
        if world.size > 1 and world.device.type == "cuda":
            same_kernels(world, stepping, engine)
        prepared = optim.PreparedOptimizer(
            stepping,
            self._run.window,
            self._scaler,
            optimizer,
            masters,
            self.sums,
            engine,
            self._drop_gradients if world.size > 1 else None,
        )
        self.stepped_by.update((id(p), prepared) for p in parameters)
        vars(optimizer)["add_param_group"] = partial(self._add_param_group, optimizer, prepared)
        self.optimizers.append(prepared)
        if settings.fused:
            self._why_not_fused[prepared] = why_not_fused
            self._note_steps()
        return prepared

    def _drop_gradients(self, parameters: Callable[[], set[int]]) -> None:
        """Drop what the strategy keeps of these parameters' gradients beside ``.grad``."""
        for route in self.models:
            self.strategy.drop(route.module, parameters)

    def _masters_for(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> Masters | None:
        """Make fp32 masters of low-precision weights, unless the optimizer rounds stochastically."""
        policy, kind = self._precision, type(optimizer).__name__
        low = [p for p in parameters if p.requires_grad and p.dtype in LOW]
        if not policy.masters and not (low and policy.keeps_updates):
            return None
        number = f"{sum(p.numel() for p in low):,} low-precision parameters"
        if not policy.masters:
            if self._run.plan.settings.stochastic_rounding and all(p.dtype == torch.bfloat16 for p in low):
                self._note_weights(f"{kind} steps {number} with stochastic rounding")
                return None
            conflict = conflicts.find({self.strategy.name, UNROUNDED}, self.strategy.conflicts)
            if conflict is not None:
                name = self.owner[id(low[0])]
                raise PrepareError(f"{kind} would lose small updates of {name!r}, which is {low[0].dtype}: {conflict}")
        for route in self.models:
            refuse_sparse(route.original, SUMMED_DENSE, "use bf16", narrow=True)
        self._note_weights(f"{kind} steps fp32 masters of {number}")
        return optim.Masters(optimizer, self.masters, frozen=policy.masters)

    def round_updates(self) -> None:
        """Round low-precision updates to nearest, as Fabric does: no masters, stochastic rounding or fp32 layers."""
        vars(self._precision).update(masters=False, keeps_updates=False, keeps_batch_norm=False)
        self._run.refine("precision", "all in one low precision, and updates are rounded to nearest")

    def _keep_frozen(self, optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
        """Refuse later steps if one of `parameters` that is frozen now, in low precision, was unfrozen since."""
        frozen = [p for p in parameters if not p.requires_grad and p.dtype in LOW]
        if frozen and not self._precision.masters and self._precision.keeps_updates:

            def check(*_: Any) -> None:
                self._refuse_unfrozen(frozen)

            self._removals.append(optimizer.register_step_pre_hook(check).remove)

    def _refuse_unfrozen(self, parameters: Iterable[Tensor]) -> None:
        """Refuse low-precision parameters unfrozen after `prepare`, which have neither fp32 values nor masters."""
        for parameter in parameters:
            if parameter.requires_grad and parameter.dtype in LOW:
                raise StepError(
                    f"{self.owner.get(id(parameter), 'a parameter')!r} trains now, but was frozen or in no optimizer "
                    f"when it was prepared, and stayed {parameter.dtype}, where small updates are lost: call "
                    "requires_grad_(True) and give it to the optimizer before prepare() (free_memory() lets you "
                    "prepare again)"
                )

    def _check_unclaimed(self, holder: str, group: str, parameters: Iterable[Tensor], remedy: str) -> None:
        """Check that `parameters` belong to prepared models, and that no prepared optimizer steps them."""
        for parameter in parameters:
            if id(parameter) not in self.owner:
                shape = tuple(parameter.shape)
                raise PrepareError(
                    f"{holder} a parameter of shape {shape}{group} that belongs to no prepared model: {remedy}"
                )
            if id(parameter) in self.stepped_by:
                raise PrepareError(
                    f"{holder} parameter {self.owner[id(parameter)]!r}, which another prepared optimizer steps "
                    "already: give each parameter to one optimizer (free_memory() lets go of the old ones)"
                )

    def _add_param_group(self, optimizer: Optimizer, prepared: PreparedOptimizer, group: dict[str, Any]) -> None:
        """Replaces `add_param_group` of the user's optimizer, and calls it."""
        items = group["params"]
        if not isinstance(items, (Tensor, set)):  # torch refuses a set, which has no order
            items = group["params"] = list(items)
        named_parameters = [items] if isinstance(items, Tensor) else items
        added = [item[1] if isinstance(item, tuple) else item for item in named_parameters]
        if self._run.world.size == 1:  # nothing is averaged, so parameters that models got since then will do
            for route in self.models:
                self.owner.update((id(p), name) for name, p in route.original.named_parameters())
        self._check_unclaimed(f"{type(optimizer).__name__}.add_param_group got", "", added, ADD_BEFORE_PREPARE)
        rounds = prepared.engine.options.rounding is not None
        if self._precision.keeps_updates and not prepared.has_masters and not rounds:
            self._refuse_unfrozen(added)
        type(optimizer).add_param_group(optimizer, group)
        self._keep_frozen(optimizer, added)
        prepared.group_added()
        self.stepped_by.update((id(p), prepared) for p in added)

    def _note_steps(self) -> None:
        """Put into the plan which step runs of each optimizer, and why."""
        reasons_of: dict[str, list[str]] = {"CuPy": [], "fused": [], "as given": []}
        for optimizer, why_not_fused in self._why_not_fused.items():
            engine, original, kind = optimizer.engine, optimizer.given, type(optimizer.given).__name__
            step, reason = "as given" if why_not_fused else "fused", why_not_fused or f"torch's fused {kind}"
            if engine.kernels is not None:
                step, reason = "CuPy", engine.reason
            elif isinstance(original, optim.OwnOptimizer):
                inner = getattr(original, "engine", engine)
                step = "CuPy" if inner.kernels else "fused"
                reason = f"easymp's {kind} by {inner.name}: {inner.reason}"
            elif engine.reason and self._run.world.device.type == "cuda":
                reason = f"{reason}: {engine.reason}"
            reasons_of[step].append(reason)
        reasons = dict.fromkeys(chain.from_iterable(reasons_of.values()))
        self._run.refine("optimizer", "; ".join(reasons), ", ".join(filter(reasons_of.get, reasons_of)))

    def _use_torch(self, reason: str) -> None:
        """Called when kernels fail, and torch steps from now on."""
        cuda.warn_once(reason)
        self._note_steps()

    # -- schedulers and loaders

    def _prepare_scheduler(self, scheduler: Any, placement: bool) -> PreparedScheduler:
        kind, optimizer = type(scheduler).__name__, getattr(scheduler, "optimizer", None)
        if not callable(getattr(scheduler, "step", None)) or not hasattr(scheduler, "state_dict"):
            raise PrepareError(
                f"prepare() got a {kind}, which is not a Module, Optimizer, scheduler or DataLoader: leave it out (a "
                "data set goes into a DataLoader first)"
            )
        optimizers = [o for o in self.optimizers if optimizer is None or optimizer is o or optimizer is o.given]
        if not optimizers:
            raise PrepareError(
                f"{kind} drives an optimizer that is not prepared: prepare that in the same call or before"
            )
        self.schedulers.append(self._options.make_scheduler(scheduler, optimizers))
        return self.schedulers[-1]

    def _prepare_loader(self, loader: DataLoader[Any], placement: bool) -> PreparedLoader:
        run, strategy = self._run, self.strategy
        prepared = self._options.make_loader(
            loader,
            run.window,
            run.world,
            strategy.data_rank,
            strategy.data_size,
            self._options.dataloader_config,
            self.seed,
            placement,
        )
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

    def routes_of(self, objects: Sequence[Any]) -> list[Route]:
        """The routes of the prepared models among `objects`."""
        ids = set(map(id, objects))
        return [route for route in self.models if id(route.view) in ids]

    def micro_step(self, models: Sequence[nn.Module], sync_each_batch: bool) -> MicroStep:
        """The context of one micro-step of `accumulate`."""
        window = self._run.window
        if not self._refuses_unprepared and window.accumulation != 1:
            self._refuses_unprepared = True
            self._removals.append(window.refuse_unprepared(self.owner, self.stepped_by, self.optimizers))
        if self._run.world.size == 1 or sync_each_batch:
            return self._plain_micro_step
        modules = [route.module for route in self.routes(models)]
        return MicroStep(window, self.strategy.no_sync, modules, self.sums.on and window.accumulation != 1)

    def begin_backward(self) -> None:
        """Check what the script did to gradients since the last backward, and make ready for the next ones."""
        window = self._run.window
        self._watches = self._always_watches or self._scaler.scales or bool(self.masters)
        checks_gradients = self._watches or window.accumulation != 1
        for optimizer in self.optimizers:
            if checks_gradients:
                optimizer.check_before_backward()
            if optimizer.turn.phase is not Phase.ACCUMULATING:
                optimizer.resume_accumulating()
        window.backwards += 1
        self._scaler.settle()
        self._sums_window = self.sums.on and window.accumulation != 1
        if self._sums_window:
            self.sums.begin()

    def check_reduction(self, create_graph: bool) -> Callable[[], None] | None:
        """The check to run after a backward that reduces gradients, if any; it raises where some are not reduced."""
        window, world = self._run.window, self._run.world
        world.note_training_thread()
        if not window.sync or window.ranks_differ or self._sums_window:
            return None
        return self.strategy.after_backward([route.module for route in self.models], create_graph)

    def end_backward(self, sync_each_batch: bool) -> None:
        """Add gradients up, average them, and divide them by the items of the window, as the micro-step asks for."""
        window, world, sums_window = self._run.window, self._run.world, self._sums_window
        if sums_window:
            self.sums.add()
            if window.sync and world.size > 1 and not sync_each_batch and not window.ranks_differ:
                modules = [route.module for route in self.models]
                self.sums.average(partial(self.strategy.average, modules))
        if window.counts_items and window.sync:
            window.finish_items(self.gradients(), world)
        if sums_window and window.sync:
            self.sums.hand_over()
            self.show_gradients(self.optimizers)
        if self._watches or not window.sync:
            self.watch_gradients()

    def gradients(self) -> Iterator[Tensor]:
        """All gradients of prepared models' parameters, fp32 sums among them."""
        for route in self.models:
            yield from (p.grad for p in route.original.parameters() if p.grad is not None)
        yield from self.sums.gradients()

    def final_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """The parameters that optimizers step, each with its gradient, at the end of a window."""
        pairs = []
        for optimizer in self.optimizers:
            for stepped, parameter in optimizer.parameters():
                gradient = parameter.grad if stepped.grad is None else stepped.grad
                if gradient is not None:
                    pairs.append((parameter, gradient))
        return pairs

    def clip(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float
    ) -> tuple[Tensor, list[Tensor]]:
        """Clip gradients, in memory or as steps read them; returns the norm before and the optimizers' parameters."""
        clipped = self.stepped_parameters(parameters)
        optimizers = self.optimizers_of_exactly(clipped) if norm_type == 2 else None
        if optimizers and optim.can_clip_in_step(optimizers):
            return optim.clip_in_step(optimizers, max_norm, self._scaler), clipped
        norm = self.strategy.clip(self._unscaled(clipped), max_norm, norm_type)
        self.show_gradients(self.optimizers)
        return norm, clipped

    def stepped_parameters(self, parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
        """`parameters`, or their fp32 masters with the gradients, as optimizers hold them."""
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self._watches:
            for optimizer in self.optimizers:
                optimizer.check_gradients()
        if not self.masters:
            return listed
        holders = [self.masters.get(id(p), p) for p in listed]
        for optimizer in self.optimizers_of(holders):
            optimizer.gather()
        return holders

    def watch_gradients(self) -> None:
        """Note the gradients that backward left: the step refuses changes of them that would train wrongly."""
        refusal = self._scaler.refuse_changes if self._scaler.scales else self._refusal_of_changes
        for optimizer in self.optimizers:
            optimizer.watch_gradients(refusal, self._shares_gradients)

    @property
    def _refusal_of_changes(self) -> Callable[[], str] | None:
        """Says why a script may not change `.grad` by itself, where the strategy does not allow that."""
        refusal = self._run.refused.get("change of gradients")
        return None if refusal is None else lambda: refusal

    def accept_gradients(self) -> None:
        """Accept changes of gradients since `watch_gradients`, for a caller that knows how they are scaled."""
        for optimizer in self.optimizers:
            optimizer.accept_gradients()

    def show_gradients(self, optimizers: Iterable[Optimizer]) -> None:
        """Let the script read, and mostly change, gradients of `optimizers` that easymp has just changed in memory."""
        refusal = self._refusal_of_changes
        if not self.masters and refusal is None:
            return
        for optimizer in optimizers:
            if isinstance(optimizer, optim.PreparedOptimizer):
                optimizer.show_gradients()
                if refusal is not None:
                    optimizer.watch_gradients(refusal)

    @property
    def _shares_gradients(self) -> bool:
        """Whether gradients may be views of a bucket, or shards, that ranks average."""
        return self._run.world.size > 1 and not self.strategy.local_updates

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Divide the gradients of `optimizers`, prepared or not, by the loss scale in memory, and clip as asked."""
        for optimizer in optimizers:
            if isinstance(optimizer, optim.PreparedOptimizer):
                optimizer.check_gradients()
                optimizer.apply_clip()
                optimizer.gather(in_memory=True)
                optimizer = optimizer.optimizer
            self._scaler.ensure_unscaled(optimizer)

    def _unscaled(self, parameters: list[Tensor]) -> list[Tensor]:
        """Unscale the gradients of `parameters` in memory, and apply earlier clips; returns `parameters`."""
        pending = any(optimizer.turn.clip is not None for optimizer in self.optimizers)
        if self._scaler.enabled or self.masters or pending:
            optimizers = self.optimizers_of(parameters)
            if self._scaler.scales:
                self._refuse_unstepped(parameters, optimizers)
            self.unscale(optimizers)
        return parameters

    def _refuse_unstepped(self, parameters: list[Tensor], optimizers: Sequence[PreparedOptimizer]) -> None:
        """Raise StepError under a loss scale where `optimizers` do not step all of `parameters` that have gradients."""
        stepped = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        unstepped = [p for p in parameters if p.grad is not None and id(p) not in stepped]
        if unstepped:
            name = self.owner.get(id(unstepped[0]), "one of them")
            raise StepError(
                f"a clip of {len(parameters)} parameters under a loss scale: {len(unstepped)} of them ({name!r} …) "
                "have gradients and are in no prepared optimizer, so that nothing divides these gradients by the "
                "loss scale. Pass the parameters that optimizers step, or call requires_grad_(False) on the others"
            )

    def clamp(self, parameters: Iterable[Tensor] | Tensor, limit: float) -> None:
        """Clamp every element of the gradients to [-limit, limit]."""
        gradients = []
        for parameter in self._unscaled(self.stepped_parameters(parameters)):
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()  # so that a row of several parts is clamped whole
                gradients.append(parameter.grad._values())
            elif parameter.grad is not None:
                gradients.append(local(parameter.grad))
        if gradients:
            torch._foreach_clamp_min_(gradients, -limit)
            torch._foreach_clamp_max_(gradients, limit)
        self.show_gradients(self.optimizers)

    def optimizers_of(self, parameters: Sequence[Tensor]) -> list[PreparedOptimizer]:
        """The prepared optimizers that hold any of `parameters`, groups that were added later included."""
        ids = {id(p) for p in parameters}
        return [o for o in self.optimizers if any(id(p) in ids for g in o.param_groups for p in g["params"])]

    def optimizers_of_exactly(self, parameters: Sequence[Tensor]) -> list[PreparedOptimizer] | None:
        """The optimizers that together step exactly these; None if there are none, or clips in steps gain nothing."""
        if not any(optimizer.engine.worth() for optimizer in self.optimizers):
            return None
        remaining = {id(p) for p in parameters if p.requires_grad or p.grad is not None}
        optimizers = []
        for optimizer in self.optimizers:
            parameters_of = (p for g in optimizer.param_groups for p in g["params"])
            ids = {id(p) for p in parameters_of if p.requires_grad or p.grad is not None}
            if ids & remaining:
                if not ids <= remaining:
                    return None
                remaining -= ids
                optimizers.append(optimizer)
        return None if remaining else optimizers

    @contextmanager
    def join(self, models: Sequence[nn.Module], even_batches: bool | None) -> Iterator[None]:
        """A context in which ranks may run out of batches; at its end they follow the one with the most updates."""
        window, loaders = self._run.window, self.loaders if even_batches is not None else []
        if self.converted:
            raise RefusedError(str(conflicts.BATCHNORM_AND_JOIN))
        if window.accumulation != 1 and self._run.world.size > 1:
            raise RefusedError(str(conflicts.ACCUMULATION_AND_JOIN))
        if len(self.routes(models)) > 1 and self._run.world.size > 1:
            raise RefusedError(str(conflicts.MODELS_AND_JOIN))
        former = [loader.even_batches for loader in loaders]
        for loader in loaders:
            loader.even_batches = bool(even_batches)
        # Ranks that are done do not take part; gradients are the same on those that are not.
        window.joining = True
        try:
            with self.strategy.join([route.module for route in self.routes(models)]):
                yield
            self._follow_longest()
        finally:
            window.joining = False
            for loader, even in zip(loaders, former):
                loader.even_batches = even

    def _follow_longest(self) -> None:
        """Copy states of optimizers, schedulers and loss scale from the rank with most updates to those with fewer."""
        world = self._run.world
        updates = world.gather_objects([optimizer.updates for optimizer in self.optimizers])
        if all(counts == updates[0] for counts in updates):
            return
        source = max(range(world.size), key=lambda rank: sum(updates[rank]))
        holders: list[Any] = [*self.optimizers, *self.schedulers, self._scaler]
        states: list[Any] = [None] * len(holders)
        if world.rank == source:
            states = [send_to_device(holder.state_dict(), "cpu") for holder in holders]
        world.broadcast_objects(states, source)
        for optimizer, count in zip(self.optimizers, updates[source]):
            optimizer.updates = count
            for _, master in optimizer.masters:
                master.detach().copy_(world.broadcast(master, source))
        if world.rank != source:
            for holder, state in zip(holders, states):
                holder.load_state_dict(state)

    def release(self) -> None:
        """Release everything. Views stay callable on each rank alone; optimizers hold their parameters again."""
        for optimizer in self.optimizers:
            optimizer.release()
            vars(optimizer.given).pop("add_param_group", None)
        self.sums.clear()
        for route in self.models:
            single_module = self._precision.forward(route.original, self._run.world.device)
            route.module = self.strategy.release(route.module, single_module)
        if self._compiling:
            self._compiling.undo()
        while self._removals:
            self._removals.pop()()
        self._refuses_unprepared = False
        for norm, kind in self.converted:
            norm.__class__ = kind  # a synchronised one waits for ranks that are gone
            vars(norm)["process_group"] = None
        for objects in (self.converted, self.models, self.optimizers, self.schedulers, self.loaders):
            objects.clear()
        tables = (self.owner, self.identities, self.stepped_by, self._prepared_by_id, self._why_not_fused, self._raised)
        for table in tables:
            table.clear()
        self._auto.total_need = None


def same_kernels(world: World, stepping: Optimizer, engine: Engine) -> None:
    """Run easymp's kernels on all ranks or on none, so that all ranks make the same collectives for gradient norms."""
    inner: Engine = getattr(stepping, "engine", engine)  # of an optimizer that runs kernels in its own step
    has_kernels = inner.kernels is not None
    if world.any(not has_kernels) and has_kernels:
        inner.fall_back_to_torch("our kernels do not run on all ranks")
