"""A prepared model is the user's own module in everything but how it is called."""

from __future__ import annotations

import copy
import io
import pickle
from functools import cached_property
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from easymp import Accelerator


@pytest.fixture
def acc():
    """Under autocast, so that a prepared model is called in another way than the module."""
    with Accelerator(cpu=True, mixed_precision="bf16") as made:
        yield made


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(()))
        self.rate = 0.5
        self.under_autocast = False

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        self.under_autocast = torch.is_autocast_enabled("cpu")
        return self.layer(x) * self.rate + shift

    @property
    def double_rate(self) -> float:
        return self.rate * 2

    @double_rate.setter
    def double_rate(self, value: float) -> None:
        self.rate = value / 2

    @cached_property
    def width(self) -> int:
        return self.layer.in_features

    def __len__(self) -> int:
        return 0  # an empty container is still a model


X = torch.ones(1, 2)


def test_it_is_the_users_class_called_under_autocast(acc):
    model, names, kinds_names = Net(), set(vars(Net())), set(vars(Net))
    view = acc.prepare(model)
    assert view(X, shift=1.0).dtype == torch.float32
    assert model.under_autocast
    model(X)
    assert not model.under_autocast
    assert isinstance(view, Net) and issubclass(type(view), Net) and len(view) == 0
    assert (type(view).__module__, type(view).__doc__) == (Net.__module__, Net.__doc__)
    assert repr(view).replace("PreparedNet", "Net") == repr(acc.unwrap_model(view))
    # nothing is set on the user's own
    assert (type(model), set(vars(model)), set(vars(Net))) == (Net, names, kinds_names)


def test_attributes_are_one_and_the_same(acc):
    model = Net()
    view = acc.prepare(model)
    assert view.layer is model.layer
    view.rate = 3.0
    assert model.rate == 3.0
    model.extra = "new"
    assert view.extra == "new"
    del view.extra
    assert not hasattr(model, "extra")
    view.head = nn.Linear(2, 1)
    assert "head.weight" in model.state_dict()
    view.double_rate = 4.0
    assert (model.rate, view.double_rate) == (2.0, 4.0)
    assert (view.width, model.__dict__["width"]) == (2, 2)
    with pytest.raises(AttributeError, match="nothing"):
        view.nothing  # noqa: B018


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_run_once_a_call(acc):
    view, seen = acc.prepare(Net()), []
    handles = [
        view.register_forward_pre_hook(lambda *_: seen.append("pre")),
        view.register_forward_hook(lambda m, i, o: seen.append(type(m).__name__)),
        view.register_full_backward_hook(lambda *_: seen.append("backward")),
        view.layer.register_forward_hook(lambda *_: seen.append("layer")),
    ]
    view(X).sum().backward()
    assert seen == ["pre", "layer", "Net", "backward"]
    for handle in handles:
        handle.remove()
    view(X)
    assert len(seen) == 4


def through_torch(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_a_copy_is_the_plain_module(acc):
    model = Net()
    view = acc.prepare(model)
    through_pickle = lambda model: pickle.loads(pickle.dumps(model))  # noqa: E731
    for again in (copy.copy, copy.deepcopy, through_pickle, through_torch):
        made = again(view)
        assert type(made) is Net and made is not model
        made(X)
        assert not made.under_autocast
        made.rate = 9.0
        assert model.rate == 0.5


class Registered(nn.Module):
    """Keeps a register of its subclasses, and wants an argument from each."""

    register: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, *, tag: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        assert tag not in Registered.register
        Registered.register[tag] = cls


class Tagged(Registered, tag="tagged"):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize("again", [False, "Tagged"])
def test_a_class_that_registers_its_subclasses(again):
    for _ in range(2):
        model = nn.Sequential(Tagged())
        with Accelerator(cpu=True, mixed_precision="bf16", activation_checkpointing=again) as acc:
            assert acc.prepare(Tagged() if again is False else model)(X).shape == (1, 2)
        assert type(model[0]) is Tagged
    assert Registered.register == {"tagged": Tagged}


class Holding(nn.Module):
    """Has what a wrapper of DistributedDataParallel has, by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 1)

    def no_sync(self) -> str:
        return "own"


def test_what_scripts_ask_of_the_wrapper_of_ddp(acc):
    model, holding = Net(), Holding()
    view, own = acc.prepare(model, holding)
    assert view.module is model
    with view.no_sync():
        view(X).sum().backward()
    assert (own.module, own.no_sync()) == (holding.module, "own")
    assert not hasattr(model, "no_sync")
    for wrapped in (view, model, nn.DataParallel(view)):
        assert acc.unwrap_model(wrapped) is model
    holder = nn.Sequential(view)
    assert acc.unwrap_model(holder) is holder


def test_a_forward_that_the_script_replaces_after_prepare(acc):
    """Patches of a model call the forward that was there before, which is the prepared one's."""
    model = Net()
    view = acc.prepare(model)
    result, before = view(X), view.forward
    view.forward = lambda x: 2 * before(x)
    torch.testing.assert_close(view(X), 2 * result)
    assert model.under_autocast
    del view.forward
    torch.testing.assert_close(view.forward(X), result)


@pytest.mark.parametrize("precision", ["no", "bf16-true"])
@pytest.mark.parametrize("frees", [False, True])
def test_what_another_run_has_prepared_is_prepared_anew(precision, frees):
    """A cell of a notebook runs again. A second `prepare` of the same run hands everything back."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    earlier = Accelerator(cpu=True, mixed_precision=precision)
    prepared = earlier.prepare(model, optimizer, scheduler, DataLoader(TensorDataset(X)))
    assert all(a is b for a, b in zip(earlier.prepare(*prepared), prepared))
    earlier.free_memory() if frees else earlier.close()
    with earlier if frees else Accelerator(cpu=True, mixed_precision=precision) as acc:
        view, again, schedule, loader = acc.prepare(*prepared)
        assert again.given is optimizer and schedule.scheduler is scheduler
        for (x,) in loader:
            acc.backward(view(x.expand(1, *x.shape[1:])).sum())
            again.step()
            schedule.step()
            again.zero_grad()
        assert acc.updates == len(loader) and schedule.get_last_lr()[0] < 0.1
