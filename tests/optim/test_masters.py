"""fp32 masters: what the optimizer steps, and that a script that knows nothing of them works."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from easymp import Accelerator, GradScalerKwargs, Settings

FP16, FP32 = torch.float16, torch.float32
SCALE = GradScalerKwargs(init_scale=1024.0)  # gradients of 1 times 2^16 overflow in fp16


def test_the_tools_of_the_step_take_the_models_own_parameters() -> None:
    with Accelerator(mixed_precision="O2", cpu=True, settings=Settings(fused=False, scaler_options=SCALE)) as acc:
        model = nn.Linear(4, 1, bias=False)
        nn.init.ones_(model.weight)
        model = acc.prepare(model)
        optimizer = acc.prepare(torch.optim.SGD(model.parameters(), lr=1.0))  # in a later call
        (master,) = optimizer.param_groups[0]["params"]

        def backward_of_threes() -> None:
            acc.backward(model(torch.full((1, 4), 3.0)).sum())

        backward_of_threes()
        assert model.weight.grad.dtype == FP16
        assert float(acc.clip_grad_norm_(model.parameters(), 1.0)) == pytest.approx(6.0, rel=1e-3)
        assert float(model.weight.grad.float().norm()) == pytest.approx(1.0, rel=1e-3)  # as the master's
        assert master.grad.norm().item() == pytest.approx(1.0, rel=1e-3)
        optimizer.step()
        assert model.weight[0].tolist() == pytest.approx([0.5] * 4, abs=1e-2)
        optimizer.zero_grad()
        backward_of_threes()
        acc.clip_grad_value_(model.weight, 0.25)
        assert master.grad.flatten().tolist() == [0.25] * 4
        backward_of_threes()
        optimizer.step()
        # However gradients are cleared, of the optimizer or of the model: nothing of the last step comes again.
        for clear in (optimizer.zero_grad, model.zero_grad, lambda: optimizer.zero_grad(set_to_none=False)):
            clear()
            backward_of_threes()
            acc.unscale_gradients()
            assert master.grad.flatten().tolist() == [3.0] * 4
            optimizer.step()
        assert acc._prepared.optimizers_of([master]) == [optimizer]
        later = acc.prepare(nn.Linear(2, 2))
        optimizer.add_param_group({"params": [later.weight], "lr": 0.1})
        optimizer.given.add_param_group({"params": [later.bias], "lr": 0.1})
        assert {p.dtype for group in optimizer.param_groups for p in group["params"]} == {FP32}
        raw_optimizer = optimizer.optimizer
    assert [p.dtype for group in raw_optimizer.param_groups for p in group["params"]] == [FP16] * 3
