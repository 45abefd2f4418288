"""One stage of a model: the user's own forward, with values only where this rank's stage is.

Nothing is traced, so train and eval, changing shapes, keyword arguments and any Python in a forward stay what they are. Every rank calls
the whole model. What lies before its stage has no values: modules there are stood in for by blank tensors of the right shape. At the
module where the stage begins, blank arguments become the ones received from the rank before. Where the next stage begins, this rank's
forward is left, and the arguments of that module are what the next rank receives.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..base.pytree import leaves, map_leaves
from ..base.rng import mix, seed_all
from ..errors import EasympError, StepError
from .cuts import Blanks, blank, call_of, holds_tensors, intercepted


class Departure(BaseException):
    """Leaves the model's forward where the next stage begins. No Exception: a model's own ``except`` must let it through."""

    def __init__(self, values: Any) -> None:
        super().__init__()
        self.values = values


class Stage:
    """Calls a model for the part that is here.

    Args:
        module: what is called: the user's model, or what wraps it.
        names: of the modules at which stages 1, 2 … begin.
        places: all modules whose calls are intercepted, by name.
        index: which stage is here.
    """

    def __init__(
        self, module: nn.Module, names: Sequence[str], places: Mapping[str, nn.Module], index: int
    ) -> None:
        self.module = module
        self.names = tuple(names)
        self.index = index
        self.last = len(names)  # index of the last stage
        self._begins = [places[name] for name in names]
        self._doors = {place: self._door(place, call_of(place)) for place in places.values()}
        self._remembered: dict[Any, Any] = {}
        self._blanks = Blanks()
        self._waits = False  # whether blank tensors are about
        self._at = 0  # the stage that the running forward has reached
        self._arrive: Callable[[list[Tensor]], list[Tensor]] = lambda values: values

    @property
    def where(self) -> str:
        """In words."""
        begins = f"begins at {self.names[self.index - 1]!r}" if self.index else "is the first"
        return f"stage {self.index} of {self.last + 1} ({begins})"

    def __call__(
        self, args: Any, kwargs: Any, arrive: Callable[[list[Tensor]], list[Tensor]]
    ) -> tuple[bool, Any]:
        """One micro-batch: whether the forward ended here, and its output or else what the next stage needs.

        Args:
            arrive: called where the stage begins with the tensors among its first module's arguments, some of them blank; returns as
                many with values.

        Raises:
            StepError: the forward did not come by as it did the first time.
        """
        self._at, self._arrive = 0, arrive
        self._waits = bool(self.index)
        if self._waits:
            self._blanks.__enter__()
        try:
            with intercepted(self._doors):
                outputs = self.module(*args, **kwargs)
        except Departure as departure:
            return False, departure.values
        except (RuntimeError, TypeError, ValueError) as error:
            if not isinstance(error, EasympError):
                error.add_note(
                    f"in {self.where}: only what is passed to the module at which a stage begins, and what follows from the model's inputs "
                    "alone, has values there"
                )
            raise
        finally:
            if self._waits:
                self._blanks.__exit__(None, None, None)
        if self._at != self.last:
            raise StepError(
                f"the forward ended in {self.where} before it called {self.names[self._at]!r}, where the next stage begins"
            )
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves(outputs)):
            raise StepError(
                f"an output of the model is computed before {self.names[-1]!r}, where the last stage begins, and not passed to it: split "
                "elsewhere, or return less"
            )
        return True, outputs

    def _door(self, module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
        def door(*args: Any, **kwargs: Any) -> Any:
            if self._at < self.last and module is self._begins[self._at]:
                self._at += 1
                if self._at == self.index:
                    args, kwargs = self._begin((args, kwargs))
                elif self._at > self.index:
                    raise Departure((args, kwargs))
            if self._at < self.index:
                return self._stand_in(module, call, args, kwargs)
            return call(*args, **kwargs)

        return door

    def _begin(self, values: Any) -> Any:
        """`values`, which the stage begins with, all with values."""
        if (
            _get_current_dispatch_mode() is self._blanks
        ):  # else a mode that the model entered lies above, and ours stays until the end
            self._waits = False
            self._blanks.__exit__(None, None, None)
        tensors = [leaf for leaf in leaves(values) if isinstance(leaf, Tensor)]
        arrived = iter(
            [_become(old, new, self.where) for old, new in zip(tensors, self._arrive(tensors), strict=True)]
        )
        return map_leaves(lambda leaf: next(arrived) if isinstance(leaf, Tensor) else leaf, values)

    def _stand_in(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The output of a module of an earlier stage, blank; worked out once for each form of the arguments."""
        if not holds_tensors(module):
            return call(*args, **kwargs)
        args, kwargs = map_leaves(blank, args), map_leaves(blank, kwargs)
        key = (id(module), module.training, form_of((args, kwargs)))
        output = self._remembered.get(key)
        if output is None:
            with torch.no_grad():
                output = call(*args, **kwargs)
            if any(not isinstance(leaf, Tensor) or not leaf.is_meta for leaf in leaves(output)):
                return output  # holds what may be another the next time
            self._remembered[key] = output
        return map_leaves(torch.empty_like, output)


def _become(old: Tensor, new: Tensor, where: str) -> Tensor:
    """`old`, with all that `new` is, so that whatever holds `old` holds it too.

    Raises:
        StepError: torch cannot do that, for something beside Python variables holds `old`.
    """
    if old is not new:
        try:
            torch.utils.swap_tensors(old, new)
        except RuntimeError as error:
            raise StepError(
                f"{where} cannot have the values that it begins with, for something else keeps what is passed there: a view of it, or a "
                "checkpoint around that module. Put checkpoints inside of modules, or split elsewhere"
            ) from error
    return old


def form_of(tree: Any) -> Any:
    """What two calls have in common that compute the same shapes: structure, shapes and dtypes, and values of what is no tensor."""
    if isinstance(tree, Tensor):
        return (tuple(tree.shape), tree.dtype, tree.is_meta)
    if isinstance(tree, Mapping):
        return (type(tree), *((key, form_of(value)) for key, value in tree.items()))
    if type(tree) in (list, tuple):
        return (type(tree), *map(form_of, tree))
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return (type(tree), tree)
    inner = list(leaves(tree))
    return (type(tree), *(() if len(inner) == 1 and inner[0] is tree else map(form_of, inner)))


@contextmanager
def own_stream(key: int, index: int, device: torch.device) -> Iterator[None]:
    """Inside, random numbers are those of stage `index`, f(key, index); the streams outside, alike on all ranks, stay where they are."""
    numpy = sys.modules.get("numpy")
    drawn = random.getstate(), numpy.random.get_state() if numpy else None, torch.get_rng_state()
    there = torch.get_device_module(device) if device.type != "cpu" else None
    on_device = there.get_rng_state() if there else None
    seed_all(mix(key, "stage", index))
    try:
        yield
    finally:
        random.setstate(drawn[0])
        if numpy:
            numpy.random.set_state(drawn[1])
        torch.set_rng_state(drawn[2])
        if there:
            there.set_rng_state(on_device)
