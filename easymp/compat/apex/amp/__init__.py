"""``apex.amp``: mixed precision by optimization levels, on CPUs and GPUs.

Models and optimizers are changed in place, as by Apex: a model gets hooks, an optimizer a subclass of its class and, at O2, fp32
masters (`easymp.optim.Masters`) in place of its half parameters. O1's casts hold from `initialize` on for the thread that called it;
DataParallel's threads run without. Not here: the interface of before `initialize` (``amp.init``), and closures with masters.
"""

from __future__ import annotations

from .casts import (
    disable_casts,
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from .initialization import initialize
from .optimizers import master_params, scale_loss
from .state import layer, load_state_dict, state_dict
from .state import state as _amp_state  # noqa: F401 (by this name scripts print the scale: _amp_state.loss_scalers[0].loss_scale())

__all__ = [
    "disable_casts", "float_function", "half_function", "initialize", "load_state_dict", "master_params", "promote_function",
    "register_float_function", "register_half_function", "register_promote_function", "scale_loss", "state_dict",
]  # fmt: skip

__getattr__ = layer.absent(
    "apex.amp",
    {
        "init": "use amp.initialize(model, optimizer, opt_level='O1')",
        "AmpHandle": "use amp.initialize and amp.scale_loss",
        "rnn_compat": "torch's RNN layers need nothing",
    },
    lambda: __all__,
)
