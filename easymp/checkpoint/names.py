"""Names of tensors, whatever wrapped the module that holds them."""

from __future__ import annotations

INSIDE = ("_orig_mod.", "_checkpoint_wrapped_module.")  # torch.compile, and torch's checkpoint_wrapper
WRAPPERS = (*INSIDE, "_fsdp_wrapped_module.")  # also torch's first FSDP
OUTER = "module."  # DistributedDataParallel and DataParallel, around the whole


def canonical(name: str) -> str:
    """A live name without what torch's wrappers of submodules put in. ``module.`` stays: it may be the user's own."""
    for word in INSIDE:
        name = name.replace(word, "")
    return name


def without_wrappers(name: str) -> str:
    """A name in a file that somebody wrote, as the plain module has it."""
    for word in WRAPPERS:
        name = name.replace(word, "")
    while name.startswith(OUTER):
        name = name.removeprefix(OUTER)
    return name
