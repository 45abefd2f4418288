"""data_parallel: the plain model on one device, copies on several."""

from __future__ import annotations

import importlib
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from easymp import Accelerator, RefusedError
from easymp.strategies import single as data_parallel
from easymp.strategies.single import choose_devices

from .models import make, train

STARTED: Any = nn.DataParallel


class TwoDevices(STARTED):
    """nn.DataParallel over two devices that are both this CPU: torch's own copies, in threads of their own."""

    def __init__(self, module: nn.Module, device_ids: list[int]) -> None:
        nn.Module.__init__(self)
        self.module, self.device_ids, self.dim = module, device_ids, 0
        self.src_device_obj, self.output_device = torch.device("cpu"), 0

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        parts = zip(*(x.chunk(len(device_ids)) for x in inputs))
        return tuple(parts), tuple({} for _ in device_ids)

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> list[Tensor]:
        outputs: dict[int, Tensor] = {}
        grad = torch.is_grad_enabled()

        def work(i: int) -> None:
            with torch.set_grad_enabled(grad):
                outputs[i] = replicas[i](*inputs[i], **kwargs[i])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(replicas))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [outputs[i] for i in range(len(replicas))]

    def gather(self, outputs: Any, output_device: Any) -> Tensor:
        return torch.cat(outputs)


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def copies(tensors: Any, devices: Any, detach: bool = False) -> list[list[Tensor]]:
        return [[t.detach().clone() if detach else t.clone() for t in tensors] for _ in devices]

    monkeypatch.setattr(
        importlib.import_module("torch.nn.parallel.replicate"), "_broadcast_coalesced_reshape", copies
    )
    monkeypatch.setattr(data_parallel, "choose_devices", lambda device, wanted: (0, 1))
    monkeypatch.setattr(nn, "DataParallel", TwoDevices)


def trained(
    strategy: str, kind: str, precision: str = "no", options: Any = None, steps: int = 2
) -> dict[str, Any]:
    with Accelerator(
        mixed_precision=precision,
        strategy=strategy,
        strategy_options=options,
        gradient_accumulation_steps=steps,
        cpu=True,
    ) as acc:
        return train(acc, kind, 0.1)


@pytest.mark.parametrize("kind", ["mlp", "conv", "tied", "idle"])
def test_one_device_is_the_plain_model(kind: str) -> None:
    assert trained("data_parallel", kind)["losses"] == trained("single", kind)["losses"]
    with Accelerator(mixed_precision="no", strategy="data_parallel", cpu=True) as acc:
        model = make(kind)
        assert acc.prepare(model) is model
        assert acc.unwrap_model(model) is model
        assert acc._prepared.strategy.data_size == 1


@pytest.mark.parametrize("kind", ["mlp", "tied", "idle"])
def test_two_devices_train_as_one(two_devices: None, kind: str) -> None:
    ours, one = trained("data_parallel", kind), trained("single", kind)
    assert ours["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert ours["norms"] == pytest.approx(one["norms"], rel=1e-5)


class Witness(nn.Module):
    seen: list[tuple[torch.dtype, int, bool]]

    def __init__(self) -> None:
        super().__init__()
        self.seen = []
        self.linear = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.seen.append((y.dtype, len(x), threading.current_thread() is threading.main_thread()))
        return y


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("no", torch.float32)]
)
def test_autocast_lives_in_the_copies(two_devices: None, precision: str, dtype: torch.dtype) -> None:
    """Threads do not inherit it."""
    with Accelerator(mixed_precision=precision, strategy="data_parallel", cpu=True) as acc:
        given = Witness()
        model = acc.prepare(given)
        out = model(torch.ones(6, 12))
        assert out.dtype == torch.float32
        assert given.seen == [(dtype, 3, False)] * 2
        assert acc.unwrap_model(model) is given
        assert isinstance(acc._prepared.models[0].route.module, TwoDevices)
        acc.backward(out.sum() / 1000)
        assert torch.allclose(
            given.linear.bias.grad, torch.full((5,), 0.006 * acc.scaler.get_scale()), rtol=1e-2
        )
        assert list(model.state_dict()) == ["linear.weight", "linear.bias"]
    assert model(torch.ones(6, 12)).dtype == torch.float32  # alone, on the first device
    assert given.seen[-1] == (dtype, 6, True)


def test_compiled_copies_are_refused(two_devices: None) -> None:
    model = make("mlp")
    model[2].compile(backend="eager")
    with Accelerator(mixed_precision="bf16", strategy="data_parallel", cpu=True) as acc:
        with pytest.raises(
            RefusedError,
            match=r"the compiled code of module\.2 would run in each of them with the first one's",
        ):
            acc.prepare(model)


def several() -> None:
    Accelerator(strategy="data_parallel")


def test_several_processes_are_refused(ranks) -> None:
    for failure in ranks.fails(several):
        assert failure.type == "RefusedError"
        assert "is for one process, and 2 were started" in failure.message


@pytest.mark.parametrize(
    ("device", "wanted", "chosen"),
    [
        ("cpu", None, ()),
        ("cuda:0", None, (0, 1, 2)),
        ("cuda:1", None, (1, 0, 2)),
        ("cuda:0", (0, 2), (0, 2)),
        ("cuda:0", (0, 3), r"there are 3 accelerators here, counted from 0: leave out \[3\]"),
        ("cuda:0", (1, 0), "the model is put on device 0: name that one first"),
        ("cpu", (0, 1), r"there are 0 accelerators here, counted from 0: leave out \[0, 1\]"),
    ],
)
def test_which_devices(monkeypatch: pytest.MonkeyPatch, device: str, wanted: Any, chosen: Any) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    if isinstance(chosen, tuple):
        assert choose_devices(torch.device(device), wanted) == chosen
    else:
        with pytest.raises(RefusedError, match=chosen):
            choose_devices(torch.device(device), wanted)


@pytest.mark.gpu
def test_on_two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two NVIDIA GPUs; here is {torch.cuda.device_count()}")
    with Accelerator(mixed_precision="bf16", strategy="data_parallel") as acc:
        given = make("tied")
        model, optimizer = acc.prepare(given, torch.optim.AdamW(given.parameters(), lr=0.01))
        assert isinstance(acc._prepared.models[0].route.module, nn.DataParallel)
        for _ in range(3):
            loss = model(torch.randn(8, 12, device=acc.device)).square().mean()
            acc.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        assert torch.isfinite(loss)
