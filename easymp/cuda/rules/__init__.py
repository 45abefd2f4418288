"""Update rules, by the class of torch that they are the same as."""

import torch

from .adam import ADAM
from .rule import Rule

RULES: dict[type, Rule] = {torch.optim.Adam: ADAM, torch.optim.AdamW: ADAM}
