"""A kernel that cannot be compiled is found before anything has changed."""

import pytest
import torch

from easymp import KernelError, StepError
from easymp.cuda.step import FusedStep

from .compiled import CompiledLauncher
from .kernels import RULES


class Failing(CompiledLauncher):
    """Compiles nothing whose name begins with `word`."""

    word = "adam_f16"

    def ready(self, kernels):
        kernels = list(kernels)
        for kernel in kernels:
            if kernel.name.startswith(self.word):
                raise KernelError(f"{kernel.name} cannot be compiled for cpu: nvrtc said so")
        super().ready(kernels)


def optimizer():
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(5)), torch.nn.Parameter(torch.randn(300).half())]
    for p in parameters:
        p.grad = torch.ones_like(p)
    return torch.optim.AdamW(parameters, lr=0.1), parameters


@pytest.mark.parametrize("loaded", [False, True])
def test_state_and_parameters_are_what_they_were(loaded):
    mine, parameters = optimizer()
    before = [p.detach().clone() for p in parameters]
    if loaded:
        mine.step()
        before = [p.detach().clone() for p in parameters]
        state = {k: {n: v.clone() for n, v in s.items()} for k, s in mine.state_dict()["state"].items()}
    launcher = Failing()
    step = FusedStep(mine, RULES[torch.optim.AdamW], launcher, ema_decay=0.9)
    with pytest.raises(KernelError, match="adam_f16"):
        step.step()
    assert launcher.launches == []
    assert all(torch.equal(p, q) for p, q in zip(parameters, before))
    if loaded:
        after = mine.state_dict()["state"]
        assert all(torch.equal(after[k][n], v) for k, s in state.items() for n, v in s.items())
        assert {k: set(s) for k, s in after.items()} == {k: set(s) for k, s in state.items()}
    else:
        assert not any(mine.state[p] for p in parameters)
    mine.step()


class Breaking(CompiledLauncher):
    """Starts nothing from launch `number` of a step on."""

    number = 0

    def launch(self, kernel, blocks, arguments):
        if len(self.launches) >= self.number:
            raise KernelError(f"{kernel.name} cannot be started on cpu: the driver said so")
        super().launch(kernel, blocks, arguments)


@pytest.mark.parametrize(("number", "error"), [(0, KernelError), (1, StepError), (2, StepError)])
def test_a_step_that_has_begun_is_not_taken_for_one_that_has_not(number, error):
    """Where nothing has moved, torch may step instead; afterwards it would step twice."""
    mine, _ = optimizer()
    launcher = Breaking()
    launcher.number = number
    with pytest.raises(error, match="cannot be started"):
        FusedStep(mine, RULES[torch.optim.AdamW], launcher).step()
    assert len(launcher.launches) == number
