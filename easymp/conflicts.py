"""What does not go together: one table of pairs of words, with a reason and a remedy each.

A word is a strategy, a precision, a part, an option that is in force, or a call of the script ("clip_grad_norm_()").
Two words without a row run together, and train as the plain loop does. A row lies in the file of the feature that
states it: `conflicts` of a strategy, precision or part; rows of options that have no such file are here. The plan,
`prepare`, the estimate, the wizard, `easymp rehearse` and docs/guarantees.md read this table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .base.units import is_size
from .errors import RefusedError
from .protocols import UNROUNDED, Conflict
from .registry import PARTS, PASSED_PARTS, PRECISIONS, STRATEGIES

if TYPE_CHECKING:
    from .settings import Settings

# Words of an update that the script itself decides: they are known at the call.
CALLS = (
    "backward(inputs=...)",
    "backward(num_items=...)",
    "change of gradients",
    "clip_grad_norm_()",
    "clip_grad_value_()",
    "create_graph=True",
    "forward_methods",
    "gradient_accumulation_steps",
    "join_uneven_inputs()",
    "no_sync()",
    "step(closure)",
)
CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # modes of torch.compile

ENDS_EARLY = "a rank's last batch ends its window in the middle of the windows of ranks that have more batches"
ACCUMULATION_AND_JOIN = Conflict(
    "join_uneven_inputs()",
    "gradient_accumulation_steps",
    ENDS_EARLY,
    "Keep even_batches=True, or set gradient_accumulation_steps=1",
)
NO_SYNC_AND_JOIN = Conflict(
    "join_uneven_inputs()", "no_sync()", ENDS_EARLY, "Keep even_batches=True, or let each backward average"
)
MODELS_AND_JOIN = Conflict(
    "join_uneven_inputs()",
    "several models",
    "torch counts the ranks that are done for the first model only, and would divide the others' gradients by all",
    "Keep even_batches=True and do not join",
)
BATCHNORM_AND_JOIN = Conflict(
    "join_uneven_inputs()",
    "convert_sync_batchnorm",
    "every forward needs the statistics of all ranks, those that are done included",
    "Leave convert_sync_batchnorm out, or keep even_batches=True and do not join",
)
CLOSURES = tuple(
    Conflict("step(closure)", other, reason, "Use an optimizer that needs no closure, or leave the other one out")
    for other, reason in (
        ("a loss scale", "a closure's steps could not be left out where a gradient overflows"),
        ("nonfinite=skip", "a closure's steps could not be left out where a gradient is not finite"),
        ("nonfinite=raise", "a closure's gradients are not there before its step"),
        ("fp32 masters", "the closure would evaluate the model at weights that the model does not have yet"),
    )
)
ITEMS = (
    Conflict(
        "backward(num_items=...)",
        "join_uneven_inputs()",
        "items are counted over all ranks, and ranks that are done take no part",
        "Pass the mean of the loss without num_items, or keep even_batches=True and do not join",
    ),
    Conflict(
        "backward(num_items=...)",
        "a second backward() in one micro-step",
        "its items would be counted twice",
        "Add the losses up and call backward() once",
    ),
)
SPARSE = tuple(
    Conflict("sparse gradients", other, reason, f"Make the embedding with sparse=False, or {remedy}")
    for other, reason, remedy in (
        ("zero1", "zero1 cuts dense ones only", "use strategy='ddp'"),
        ("fsdp", "fsdp reduces dense ones only", "use strategy='ddp'"),
        ("hsdp", "fsdp reduces dense ones only", "use strategy='ddp'"),
        ("O2", "gradients of low-precision parameters are summed in fp32, dense ones only", "use bf16"),
        ("fp16-true", "gradients of low-precision parameters are summed in fp32, dense ones only", "use bf16"),
        (UNROUNDED, "gradients of low-precision parameters are summed in fp32, dense ones only", "use bf16"),
    )
)
PACKING = tuple(
    Conflict("dataloader_config.tokens", other, reason, "Use strategy='fsdp', or leave tokens out")
    for other, reason in (
        ("pipeline", "it cuts a batch by samples for its stages, and a packed batch is one row"),
        ("data_parallel", "it cuts a batch by samples for its devices, and a packed batch is one row"),
        ("context_parallel", "it cuts sequences, and the documents of a packed one with them"),
    )
)
ROUNDING = Conflict(
    "stochastic_rounding",
    "an optimizer without stochastic rounding",
    "which are for Adam, AdamW, SGD, Adagrad, Lion, LAMB and NovoGrad",
    "Leave stochastic_rounding out, or use one of these",
)
# Whether these are in force is known at the call: accumulation can be set later, and a model may have no batch-norm.
AT_CALL = (ACCUMULATION_AND_JOIN, BATCHNORM_AND_JOIN, MODELS_AND_JOIN, NO_SYNC_AND_JOIN, *ITEMS)
OPTIONS = (*AT_CALL, *CLOSURES, *SPARSE, *PACKING, ROUNDING)


def table() -> list[Conflict]:
    """All rows of the table: those of strategies, precisions, parts and options."""
    owners: list[Any] = [*STRATEGIES.values(), *PRECISIONS.values(), *PARTS.values(), *PASSED_PARTS.values()]
    return list(dict.fromkeys(row for rows in (*(owner.conflicts for owner in owners), OPTIONS) for row in rows))


def words_of(settings: Settings) -> set[str]:
    """The words that settings put in force, beside strategy and precision."""
    switches = "activation_offload convert_sync_batchnorm ema_decay optimizer_in_backward stochastic_rounding"
    words = {name for name in switches.split() if getattr(settings, name)}
    if settings.gradient_accumulation_steps > 1:
        words.add("gradient_accumulation_steps")
    if _field(settings.dataloader_config, "tokens") is not None:
        words.add("dataloader_config.tokens")
    if _field(settings.compile, "mode") in CUDA_GRAPHS:
        words.add("compile with CUDA graphs")
    if settings.nonfinite is not None:
        words.add(f"nonfinite={settings.nonfinite}")
    recomputed = settings.activation_checkpointing or "no"
    if recomputed != "no":
        kind = " by size" if is_size(recomputed) else f"={recomputed}"
        words |= {"activation_checkpointing", f"activation_checkpointing{kind}"}
    return words


def _field(options: Any, name: str) -> Any:
    """A field of options, which are a record, a table of the settings file, or another value."""
    return options.get(name) if isinstance(options, Mapping) else getattr(options, name, None)


def rows_of(strategy: Any, precision: Any, settings: Settings) -> Iterator[Conflict]:
    """The rows that can matter under a strategy, a precision and settings; other features are not imported."""
    yield from strategy.conflicts
    yield from precision.conflicts
    for name in PARTS.asked(settings):
        yield from PARTS[name].conflicts
    yield from OPTIONS


def find(words: Collection[str], rows: Iterable[Conflict]) -> Conflict | None:
    """The first row with two of `words`."""
    return next((row for row in rows if row.word in words and row.other in words), None)


def check(words: Collection[str], rows: Iterable[Conflict]) -> None:
    """Raise a RefusedError where two of `words` do not go together."""
    conflict = find(words, rows)
    if conflict is not None:
        raise RefusedError(str(conflict))


def refused_calls(words: Collection[str], rows: Iterable[Conflict]) -> Mapping[str, str]:
    """The calls of `CALLS` that do not go together with one of `words`, each with its sentence."""
    refused: dict[str, str] = {}
    for row in rows:
        if row in AT_CALL:
            continue
        for call, other in ((row.word, row.other), (row.other, row.word)):
            if call in CALLS and other in words:
                refused.setdefault(call, str(row._replace(word=call, other=other)))
    return refused
