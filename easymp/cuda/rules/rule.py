"""What an update rule is: data, from which kernels are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Group = Mapping[str, Any]


@dataclass(frozen=True)
class Survey:
    """What a rule wants to know of a whole tensor before it moves any of it: sums over its elements, on all ranks that have some.

    Attributes:
        sums: names of the totals.
        reads: what `element` sees, ``g`` (unscaled and clipped) first.
        element: C++ on floats, once an element, that adds to `sums`.
        weigh: C++ on doubles, once a tensor: sees the totals and what the rule's `prepare` does but ``step``; changes `constants`.
        moves: whether `element` sees the states, and writes them; the rule's own then only reads them.
    """

    sums: tuple[str, ...]
    element: Callable[[tuple[str, ...]], str]
    weigh: str
    moves: bool = False
    reads: tuple[str, ...] = ("g", "p")


@dataclass(frozen=True)
class Rule:
    """How one optimizer moves a parameter.

    Attributes:
        name: a C identifier.
        states: keys of what is kept of each element, as torch names them; of those that a group needs, see `uses`.
        uses: of a param group, which of `states` it has.
        refuse: of a param group, why it is not for these kernels, in words; None where it is.
        hyper: of a param group, its numbers without lr, in the order of `numbers`.
        numbers: what `prepare` calls them; "lr" comes before them.
        prepare: C++ on doubles, once a tensor and step: sees `numbers`, ``lr``, ``step`` (of this step, from 1) and ``norm``, and
            sets `constants`.
        constants: floats that `element` sees.
        element: C++ on floats, once an element: ``p``, ``g`` (unscaled and clipped) and the states.
        reference: the same by torch in float64 or float32: ``(p, g, states, group, step)``, in place.
        counts: whether the state has a ``step``; if not, steps are counted beside it, from 1 where states were there before.
        starts: of a param group, the value that states start with.
        scalar: key of a float32 number of each tensor, 0-dim, that `Survey.weigh` sees and writes; "" where there is none.
        norm: whether `prepare` is to be told the norm of all gradients, as they are when the rule sees them; else it is 0.
        survey: a pass over the elements before the update.
    """

    name: str
    states: tuple[str, ...]
    uses: Callable[[Group], tuple[str, ...]]
    refuse: Callable[[Group], str | None]
    hyper: Callable[[Group], Sequence[float]]
    numbers: tuple[str, ...]
    prepare: str
    constants: tuple[str, ...]
    element: Callable[[tuple[str, ...]], str]
    reference: Callable[[Tensor, Tensor, dict[str, Any], Group, int], None]
    counts: bool = True
    starts: Callable[[Group], float] = lambda group: 0.0
    scalar: str = ""
    norm: bool = False
    survey: Survey | None = None
