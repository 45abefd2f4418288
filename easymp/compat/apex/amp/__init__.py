"""``apex.amp``: mixed precision by optimization levels, on CPUs and GPUs.

Models and optimizers are changed in place, as by Apex: a model gets hooks, an optimizer a subclass of its class and, at O2, fp32
masters (`easymp.optim.Masters`) in place of its half parameters. O1's casts hold from `initialize` on for the thread that called it;
DataParallel's threads run without. Not here: closures with masters, and the scaling of losses by the handle that `init` returns.
"""

from __future__ import annotations

from ...layer import submodules
from . import casts, initialization, optimizers, state
from .casts import *  # noqa: F403
from .initialization import initialize
from .optimizers import master_params, scale_loss
from .state import layer, load_state_dict, state_dict
from .state import state as _amp_state

__all__ = [*casts.__all__, "initialize", "load_state_dict", "master_params", "scale_loss", "state_dict"]
OLD = "use amp.initialize(model, optimizer, opt_level='O1') and amp.scale_loss"
INTERNAL = "it is Apex's own machinery; amp.register_half_function and its kind change how functions are cast"
submodules(
    __name__,
    {
        "_amp_state": {
            "AmpState": state.AmpState,
            "_amp_state": _amp_state,
            "master_params": master_params,
            "maybe_print": state.maybe_print,
        },
        "amp": casts,
        "frontend": {
            "Properties": state.Properties,
            "initialize": initialization.initialize,
            "load_state_dict": load_state_dict,
            "opt_levels": state.LEVELS,
            "state_dict": state_dict,
        },
        "handle": {
            "AmpHandle": casts.AmpHandle,
            "disable_casts": casts.disable_casts,
            "scale_loss": optimizers.scale_loss,
            "absent": {"NoOpHandle": OLD},
        },
        "opt": OLD,
        "scaler": {"LossScaler": state.LossScaler},
        **dict.fromkeys(("_initialize", "_process_optimizer", "compat", "lists", "utils", "wrap"), INTERNAL),
        "rnn_compat": "torch's RNN layers need nothing",
    },
    layer,
    "apex.amp",
)
__getattr__ = layer.absent("apex.amp", {"AmpHandle": OLD}, lambda: __all__)
