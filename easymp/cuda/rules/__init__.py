"""Update rules, by the class of torch that they are the same as."""

import torch

from ..rule import Rule
from .adagrad import ADAGRAD
from .adam import ADAM
from .lamb import LAMB
from .larc import Trust, larc
from .lion import LION
from .novograd import NOVOGRAD
from .sgd import SGD

RULES: dict[type, Rule] = {
    torch.optim.Adam: ADAM,
    torch.optim.AdamW: ADAM,
    torch.optim.SGD: SGD,
    torch.optim.Adagrad: ADAGRAD,
}
ALL = (
    ADAM,
    SGD,
    ADAGRAD,
    LION,
    LAMB,
    NOVOGRAD,
    *(larc(rule, Trust()) for rule in (ADAM, SGD, ADAGRAD, LION)),
)

__all__ = ["ADAGRAD", "ADAM", "ALL", "LAMB", "LION", "NOVOGRAD", "RULES", "SGD", "Rule", "Trust", "larc"]
