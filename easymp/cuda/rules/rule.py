"""What an update rule is: data, from which kernels are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Group = Mapping[str, Any]


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
        prepare: C++ on doubles, once a tensor and step: sees `numbers`, ``lr`` and ``step`` (of this step, from 1), and sets
            `constants`.
        constants: floats that `element` sees.
        element: C++ on floats, once an element: ``p``, ``g`` (unscaled and clipped) and the states.
        reference: the same by torch in float64 or float32: ``(p, g, states, group, step)``, in place, for tests.
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
    reference: Callable[[Tensor, Tensor, dict[str, Tensor], Group, int], None]
