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
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from .. import conflicts, cuda, optim
from ..base.dtensor import follow
from ..base.parts import Part
from ..base.pytree import send_to_device
from ..base.rng import diverge
from ..data import PreparedLoader, SkippedLoader, prepare_loader
from ..distributed import World
from ..errors import PrepareError, RefusedError, StepError
from ..logging import get_logger
from ..nn import batchnorms, convert_sync_batchnorm
from ..options import DataLoaderConfiguration
from ..plan import AUTO
from ..precision.policies import LOW, raise_weights
from ..protocols import SMALL_EPS, UNROUNDED, Strategy, WrapContext
from ..strategies.blocks import refuse_sparse
from ..strategies.meta_init import materialise
from ..strategies.transforms import CompileOptions, Compiling, can_compile
from .memory import AutoStrategy, Memory
from .state import Run, compare_prepared
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
    """How objects are prepared, beside the settings: records of options, and what the migration layers change."""

    loading: DataLoaderConfiguration
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
    """Prepares the objects of one run, and keeps them in tables, in the order in which they came."""

    refuses_unprepared = False  # steps of unprepared optimizers inside a window are refused

    def __init__(
        self,
        run: Run,
        strategy: Strategy,
        options: PrepareOptions,
        no_sync: Callable[[nn.Module], AbstractContextManager[Any]],
    ) -> None:
        self._run, self._options, self._no_sync = run, options, no_sync
        self._auto = AutoStrategy(run)
        self.models: list[Route] = []  # each as the route of its calls
        self.optimizers: list[PreparedOptimizer] = []
        self.schedulers: list[PreparedScheduler] = []
        self.loaders: list[PreparedLoader] = []
        self._prepared_by_id: dict[int, Any] = {}  # id of the script's object, or of the prepared one → that
        self.owner: dict[int, str] = {}  # id of a prepared parameter → its name
        self.identities: dict[int, Identity] = {}  # by id of a model
        self.stepped_by: dict[int, PreparedOptimizer] = {}  # by id of a parameter
        self.masters: dict[int, Tensor] = {}  # id of a low-precision parameter → its fp32 master
        self.sums = optim.Sums(self.masters)  # of low-precision gradients over a window, in fp32
        # Batch-norms that became synchronised ones, and the classes they had.
        self.converted: list[tuple[nn.Module, type]] = []
        self._raised: dict[int, torch.dtype] = {}  # id of a parameter raised to fp32 → the dtype that it came in
        self._why_not_fused: dict[PreparedOptimizer, str | None] = {}  # why torch has no fused step for it
        self._compiling = Compiling(options.compile) if options.compile else None
        self._removals: list[Callable[[], None]] = []  # each removes a hook
        self._weights_notes: list[str] = []  # reasons of the plan's line "weights"
        self._take_strategy(strategy)
        # The window refuses calls as the run does. It belongs to the run, so it holds the run weakly.
        reference = weakref.ref(run)
        run.window.refuse = lambda *words: reference().refuse(*words)  # type: ignore[union-attr]
        if strategy.context_size > 1:
            shared = f"{strategy.context_size} neighbouring processes share each sequence"
            run.refine("strategy", f"{run.plan.strategy.reason}; {shared}")
        seed = run.plan.settings.seed
        # For the data order and the ranks' random streams; the same on all ranks once something is prepared.
        self.seed = torch.initial_seed() if seed is None else seed
        self._has_common_seed = seed is not None  # whether `seed` is the same on all ranks
        # Whether all ranks still draw from one random stream, so that the first models give each rank one of its own.
        self._will_diverge = options.diverge and self._has_common_seed

    @property
    def batch(self) -> str:
        """The arithmetic of the first loader's global batch, as text."""
        if not self.loaders or self.loaders[0].batch_size is None:
            return ""
        return self.loaders[0].batch_line(self._run.window.accumulation)

    def prepare(
        self, objects: Sequence[Any], device_placement: Sequence[bool | None] | None, methods: str | Sequence[str] = ()
    ) -> list[Any]:
        """Prepare `objects`, and return them in the same order. Calls of `methods` of the models count as forward."""
        if device_placement is not None and len(device_placement) != len(objects):
            raise PrepareError(
                f"device_placement has {len(device_placement)} values for {len(objects)} objects: pass one for each"
            )
        objects = [self._script_object(item) for item in objects]
        run, prepared_by_id = self._run, self._prepared_by_id
        unique_models = dict.fromkeys(o for o in objects if isinstance(o, nn.Module))
        models = [model for model in unique_models if id(model) not in prepared_by_id]
        optimizers = [
            o.optimizer if isinstance(o, optim.PreparedOptimizer) else o for o in objects if isinstance(o, Optimizer)
        ]
        self.identities.update((id(model), identity(model)) for model in models)
        methods_of = dict(zip(map(id, models), forward_methods(models, methods)))
        self._check_models(models)
        seeds = [torch.initial_seed()]
        if run.world.size > 1:
            lines = [f"forward methods {names}" for names in methods_of.values()]
            seeds = compare_prepared(run, objects, self._options.records, lines)
        if not self._has_common_seed:
            self._has_common_seed, self.seed = True, seeds[0]  # rank 0's
            self._will_diverge = self._options.diverge and len(set(seeds)) == 1
        if models:
            self._change_models(models, optimizers, any(methods_of.values()))
        default = run.plan.settings.device_placement
        placements = [default if choice is None else choice for choice in device_placement or [None] * len(objects)]
        new: list[Any] = []
        preparations: tuple[tuple[type, Callable[[Any, bool], Any]], ...] = (
            (nn.Module, partial(self._prepare_model, optimizers=optimizers, methods_of=methods_of)),
            (Optimizer, self._prepare_optimizer),
            (DataLoader, self._prepare_loader),
            (object, self._prepare_scheduler),  # which refuses objects that are no schedulers
        )
        for kind, prepare_item in preparations:
            for item, placement in zip(objects, placements):
                if isinstance(item, kind) and id(item) not in prepared_by_id:
                    is_ready = isinstance(item, PREPARED)
                    prepared_by_id[id(item)] = item if is_ready else prepare_item(item, placement)
                    new.append(prepared_by_id[id(item)])
        if models and self._will_diverge and self.strategy.data_rank:
            diverge(self.strategy.data_rank)  # the same for ranks that share their data: they draw the same dropout
            self._will_diverge = False
        for notify in run.parts.prepared:
            notify(new)
        return [prepared_by_id[id(item)] for item in objects]

    def _script_object(self, item: Any) -> Any:
        """The script's object, if `item` is what another run has made of it, or this one before `free_memory`."""
        if any(item is prepared for prepared in (*self.optimizers, *self.schedulers, *self.loaders)):
            return item
        if isinstance(item, optim.PreparedOptimizer):
            return item.given
        if isinstance(item, optim.PreparedScheduler):
            return item.scheduler
        return item.original if isinstance(item, PreparedLoader) else item

    def _take_strategy(self, strategy: Strategy) -> None:
        self.strategy = strategy
        # Gradients may be views of a bucket, or shards, that ranks average.
        self.shares_gradients = self._run.world.size > 1 and not strategy.local_updates
        self._run.find_refused(strategy)

    # -- models

    def _check_models(self, models: Sequence[nn.Module]) -> None:
        owner = dict(self.owner)
        for model in models:
            kind = type(model).__name__
            if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
                raise PrepareError(f"the model is already in a {kind}: pass its .module, and the strategy wraps it")
            for name, parameter in model.named_parameters():
                if isinstance(parameter, nn.UninitializedParameter):
                    raise PrepareError(
                        f"parameter {name!r} of this {kind} has no shape yet: call the model once on a batch before "
                        "prepare(), so that its lazy layers are made"
                    )
                if id(parameter) in owner:
                    raise PrepareError(
                        f"parameter {name!r} of this {kind} was prepared before, as {owner[id(parameter)]!r}: prepare "
                        "one module that holds both parts, once"
                    )
                owner[id(parameter)] = name

    def _change_models(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], has_methods: bool) -> None:
        """Choose the strategy, if that is "auto", and apply changes that every strategy shares, before it wraps."""
        run = self._run
        if run.plan.settings.strategy == AUTO and run.world.size > 1:
            self._take_strategy(self._auto.choose(models, optimizers, self.strategy))
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
            if run.plan.compile is not None:  # the plan chose it: leave out models that cannot be compiled
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
        run, strategy, precision = self._run, self.strategy, self._run.precision
        world, parts, initialize = run.world, run.parts, run.plan.settings.initialize
        if precision.raises:
            self._raise_weights(model)
        if not strategy.sharded and any(t.is_meta for t in chain(model.parameters(), model.buffers())):
            materialise(model, world.device if placement else torch.device("cpu"), initialize)
        context = WrapContext(precision, placement, initialize)
        if self._compiling:
            context = context._replace(compile=self._compiling.compile_model)
        wrapped = strategy.wrap(model, optimizers, context)
        if precision.swaps and strategy.sharded:
            self._note_weights(f"gathered in bf16, and rounded for {precision.name} after each gather")
        if world.size > 1:
            world.set_group_timeouts()
        if precision.masters or (strategy.sums and run.window.accumulation != 1):
            refuse_sparse(model, SUMMED_DENSE, "keep its weights in fp32", narrow=True)
        no_sync = partial(self._no_sync, model)
        refusal = run.refused.get("create_graph=True", "")
        route = Route(model, wrapped, no_sync, explain=world.blame, parts=parts, no_double_backward=refusal, view=model)
        overrides_forward = (part.needs_views and type(part).forward is not Part.forward for part in parts.all)
        always_view = self._options.always_views or (bool(parts.forward) and any(overrides_forward))
        make_view(route, methods_of[id(model)], strategy.sharded, always_view)  # sets route.view
        self.models.append(route)
        self._prepared_by_id[id(route.view)] = route.view
        self.owner.update((id(p), name) for name, p in model.named_parameters())
        if strategy.sums and (self.sums.on or any(p.requires_grad and p.dtype in LOW for p in model.parameters())):
            self._sum_in_fp32()  # gradients of earlier models, too
        return route.view

    def _raise_weights(self, model: nn.Module) -> None:
        """Raise trainable low-precision parameters of `model` to fp32."""
        raised = raise_weights(model)
        if raised:
            self._raised.update((id(p), dtype) for p, dtype in raised)
            dtypes = " and ".join(sorted({str(dtype).removeprefix("torch.") for _, dtype in raised}))
            number = f"{sum(p.numel() for p, _ in raised):,} trainable parameters"
            self._note_weights(f"{number} of {type(model).__name__} raised from {dtypes}")

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
        run, strategy, precision = self._run, self.strategy, self._run.precision
        settings, groups, kind = run.plan.settings, optimizer.param_groups, type(optimizer).__name__
        remedy = "prepare the model in the same call or before, and build the optimizer from that model's parameters"
        for number, group in enumerate(groups):
            self._check_unclaimed(f"{kind} holds", f" (param group {number})", group["params"], remedy)
        parameters = [p for group in groups for p in group["params"]]
        rows = precision.conflicts
        if rows and isinstance(optimizer, torch.optim.Adam) and any(group["eps"] < 1e-4 for group in groups):
            conflicts.check({precision.name, SMALL_EPS}, rows)
        if optimizer.state:
            follow(optimizer, self._raised)  # states move, and become fp32, with their parameters
        masters = why_not_fused = None
        if precision.masters or any(p.dtype in LOW for p in parameters):
            masters = self._masters_for(optimizer, parameters)
            self._watch_frozen(optimizer, parameters)
        if isinstance(optimizer, optim.OwnOptimizer) and not settings.fused:
            for group in groups:  # read also by an engine inside the optimizer, as in Apex's layer
                group["fused"] = group.get("fused") or False
        elif settings.fused and not isinstance(optimizer, optim.OwnOptimizer):
            why_not_fused = optim.fuse(optimizer, [route.original for route in self.models])
        stepping = strategy.spread(optimizer)
        counting, is_alone = strategy.counting, run.world.size == 1
        if isinstance(stepping, optim.OwnOptimizer) and counting.add is not None:
            stepping.counting = counting
        free = settings.fused and not any(part.steps_in_backward for part in run.parts.all)
        options = optim.EngineOptions(settings.ema_decay)
        if settings.stochastic_rounding:
            rounding_seed = (settings.seed or 0) % 2**63
            options = optim.EngineOptions(settings.ema_decay, torch.bfloat16, stochastic_rounding=rounding_seed)
        engine = optim.Engine(
            stepping, options, counting, free=free, masters=masters, failed=self._use_torch, scaled=run.scaler.enabled
        )
        if not is_alone and run.world.device.type == "cuda":
            same_kernels(run.world, stepping, engine)
        drop_gradients = None if is_alone else self._drop_gradients
        prepared = optim.PreparedOptimizer(
            stepping, run.window, run.scaler, optimizer, masters, self.sums, engine, drop_gradients
        )
        self.stepped_by.update((id(p), prepared) for p in parameters)
        vars(optimizer)["add_param_group"] = partial(self._add_param_group, optimizer, prepared)  # `release` removes it
        self.optimizers.append(prepared)
        if settings.fused:
            self._why_not_fused[prepared] = why_not_fused
            self._note_steps()
        return prepared

    def _drop_gradients(self, parameter_ids: Callable[[], set[int]]) -> None:
        """Drop what the strategy keeps of these parameters' gradients beside ``.grad``."""
        for route in self.models:
            self.strategy.drop(route.module, parameter_ids)

    def _masters_for(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> Masters | None:
        """Make fp32 masters of low-precision weights, unless the optimizer rounds stochastically."""
        policy, kind = self._run.precision, type(optimizer).__name__
        low = [p for p in parameters if p.requires_grad and p.dtype in LOW]
        keeps_updates = bool(low) and policy.keeps_updates  # small updates need masters or stochastic rounding
        if not policy.masters and not keeps_updates:
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
        vars(self._run.precision).update(masters=False, keeps_updates=False, keeps_batch_norm=False)  # on the instance
        self._run.refine("precision", "all in one low precision, and updates are rounded to nearest")

    def _watch_frozen(self, optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
        """Let later steps check that low-precision `parameters` that are frozen now still are."""
        frozen = [p for p in parameters if not p.requires_grad and p.dtype in LOW]
        if frozen and not self._run.precision.masters and self._run.precision.keeps_updates:

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

    def _check_unclaimed(self, subject: str, group: str, parameters: Iterable[Tensor], remedy: str) -> None:
        """Refuse parameters of no prepared model, or of another prepared optimizer; the error begins with `subject`."""
        for parameter in parameters:
            if id(parameter) not in self.owner:
                shape = tuple(parameter.shape)
                raise PrepareError(
                    f"{subject} a parameter of shape {shape}{group} that belongs to no prepared model: {remedy}"
                )
            if id(parameter) in self.stepped_by:
                raise PrepareError(
                    f"{subject} parameter {self.owner[id(parameter)]!r}, which another prepared optimizer steps "
                    "already: give each parameter to one optimizer (free_memory() lets go of the old ones)"
                )

    def _add_param_group(self, optimizer: Optimizer, prepared: PreparedOptimizer, group: dict[str, Any]) -> None:
        """Replaces `add_param_group` of the user's optimizer, and calls it."""
        params = group["params"]  # a tensor, or several, or pairs of name and tensor, as in torch
        if not isinstance(params, (Tensor, set)):  # torch refuses a set, which has no order
            params = group["params"] = list(params)
        items = [params] if isinstance(params, Tensor) else params
        added = [item[1] if isinstance(item, tuple) else item for item in items]
        if self._run.world.size == 1:  # no rank averages: accept parameters that models got after `prepare`
            for route in self.models:
                self.owner.update((id(p), name) for name, p in route.original.named_parameters())
        self._check_unclaimed(f"{type(optimizer).__name__}.add_param_group got", "", added, ADD_BEFORE_PREPARE)
        rounds = prepared.engine.options.rounding is not None
        if self._run.precision.keeps_updates and not prepared.has_masters and not rounds:
            self._refuse_unfrozen(added)
        models = [route.original for route in self.models]
        is_fused = prepared in self._why_not_fused and self._why_not_fused[prepared] is None
        if is_fused and not optim.fuses(optimizer, {**group, "params": added}, models):
            group.setdefault("fused", False)
        type(optimizer).add_param_group(optimizer, group)
        self._watch_frozen(optimizer, added)
        prepared.group_added()
        self.stepped_by.update((id(p), prepared) for p in added)

    def _note_steps(self) -> None:
        """Put into the plan which step runs of each optimizer, and why."""
        reasons_by_step: dict[str, list[str]] = {"CuPy": [], "fused": [], "as given": []}
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
            reasons_by_step[step].append(reason)
        reasons = "; ".join(dict.fromkeys(chain.from_iterable(reasons_by_step.values())))
        self._run.refine("optimizer", reasons, ", ".join(step for step in reasons_by_step if reasons_by_step[step]))

    def _use_torch(self, reason: str) -> None:
        """Report that kernels have failed, and that torch steps from now on."""
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
        run, strategy, options = self._run, self.strategy, self._options
        prepared = options.make_loader(
            loader, run.window, run.world, strategy.data_rank, strategy.data_size, options.loading, self.seed, placement
        )
        self.loaders.append(prepared)
        if len(self.loaders) == 1 and logger.isEnabledFor(logging.INFO) and self.batch:
            logger.info("batch: %s", self.batch)
        return prepared

    # -- the table

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

    def optimizers_of(self, parameters: Sequence[Tensor]) -> list[PreparedOptimizer]:
        """The prepared optimizers that hold any of `parameters`, groups that were added later included."""
        ids = {id(p) for p in parameters}
        return [o for o in self.optimizers if any(id(p) in ids for g in o.param_groups for p in g["params"])]

    def refuse_unprepared(self) -> None:
        """From now on, refuse steps of unprepared optimizers, which would step on a part of the gradient."""
        self.refuses_unprepared = True
        self._removals.append(register_optimizer_step_pre_hook(self._check_prepared).remove)

    def _check_prepared(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Refuse a step of an unprepared optimizer on prepared parameters inside a window; called at every step."""
        window = self._run.window
        if not window.in_accumulate or window.accumulation == 1:
            return
        if any(optimizer is prepared.optimizer or optimizer is prepared.given for prepared in self.optimizers):
            return  # it may hold groups that were added since
        ids = (id(p) for group in optimizer.param_groups for p in group["params"])
        if any(p in self.owner and p not in self.stepped_by for p in ids):
            raise StepError(
                f"{type(optimizer).__name__} stepped inside accumulate() but was not prepared: it would step at each "
                f"of the {window.accumulation} micro-batches. Pass it to prepare() and use what that returns"
            )

    @contextmanager
    def join(self, models: Sequence[nn.Module], even_batches: bool | None) -> Iterator[None]:
        """A context in which ranks may run out of batches; at its end they follow the one with the most updates."""
        window = self._run.window
        loaders = [] if even_batches is None else self.loaders
        if self.converted:
            raise RefusedError(str(conflicts.BATCHNORM_AND_JOIN))
        if window.accumulation != 1 and self._run.world.size > 1:
            raise RefusedError(str(conflicts.ACCUMULATION_AND_JOIN))
        if len(self.routes(models)) > 1 and self._run.world.size > 1:
            raise RefusedError(str(conflicts.MODELS_AND_JOIN))
        former = [loader.even_batches for loader in loaders]
        for loader in loaders:
            loader.even_batches = bool(even_batches)
        # Ranks that have no batch left take no part in the window; gradients are the same on the others.
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
        holders: list[Any] = [*self.optimizers, *self.schedulers, self._run.scaler]
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
            single_module = self._run.precision.forward(route.original, self._run.world.device)  # without the strategy
            route.module = self.strategy.release(route.module, single_module)
        if self._compiling:
            self._compiling.undo()
        while self._removals:
            self._removals.pop()()
        self.refuses_unprepared = False
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
