"""Scripts written for other libraries, after a change of their import line.

| written for | import line here |
|---|---|
| ``from accelerate import Accelerator`` | ``from easymp.compat.accelerate import Accelerator`` |
| ``from apex import amp`` | ``from easymp.compat.apex import amp`` |
| ``from torch.cuda.amp import GradScaler`` | ``from easymp.compat.torch_cuda.amp import GradScaler`` |
| ``import deepspeed`` | ``from easymp.compat import deepspeed`` |
| ``import horovod.torch as hvd`` | ``import easymp.compat.horovod as hvd`` |
| ``from lightning_fabric import Fabric`` | ``from easymp.compat.lightning_fabric import Fabric`` |

`install` gives a process easymp under the name ``accelerate``, for libraries such as transformers that import it.

Each layer is thin: the loss scale, strategies, optimizers and checkpoints are the library's own. One warning names all
options without effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import at_first_use

if TYPE_CHECKING:
    from .alias import install as install

MOVED = {"explain": "warnings name the options without effect, and the pages of migrating easymp's own lines"}
__all__, __getattr__, __dir__ = at_first_use(__name__, globals(), {"alias": ("install",)}, elsewhere=MOVED)
