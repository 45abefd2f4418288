"""Names of tensors, whatever wrapped the module that holds them."""

from __future__ import annotations

COMPILED = "_orig_mod."  # torch.compile
WRAPPERS = (
    COMPILED,
    "_fsdp_wrapped_module.",
    "_checkpoint_wrapped_module.",
)  # also torch's first FSDP, and its checkpoint_wrapper
OUTER = "module."  # DistributedDataParallel and DataParallel, around the whole


def canonical(name: str) -> str:
    """A live name without what torch.compile puts in. ``module.`` stays: it may be the user's own."""
    return name.replace(COMPILED, "")


def without_wrappers(name: str) -> str:
    """A name in a file that somebody wrote, as the plain module has it."""
    for word in WRAPPERS:
        name = name.replace(word, "")
    while name.startswith(OUTER):
        name = name.removeprefix(OUTER)
    return name
