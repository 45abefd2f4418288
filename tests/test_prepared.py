"""A prepared model is the user's own module in everything but how it is called."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import pytest
import torch
from torch import Tensor, nn

from easymp.training.wrapper import make_view, unwrap

T = TypeVar("T")


class Wrapper(nn.Module):
    """Stands for autocast and DDP: counts, and marks what it returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.module(*args, **kwargs) + 100


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(()))
        self.rate = 0.5

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        return self.layer(x) * self.rate + shift

    def predict(self, x: Tensor) -> Tensor:
        """Calls itself, as generate() does."""
        return self(x).argmax(-1)

    def raw(self, x: Tensor) -> Tensor:
        return self(x)

    @property
    def double_rate(self) -> float:
        return self.rate * 2

    @double_rate.setter
    def double_rate(self, value: float) -> None:
        self.rate = value / 2

    @cached_property
    def width(self) -> int:
        return self.layer.in_features

    @classmethod
    def build(cls) -> Net:
        return cls()

    def __len__(self) -> int:
        return 0  # an empty container is still a model


X = torch.ones(1, 2)


def view_of(model: nn.Module) -> tuple[Any, Any, Wrapper]:
    wrapper = Wrapper(model)
    view, route = make_view(model, wrapper)
    return view, route, wrapper


def test_the_call_goes_through_the_wrapper() -> None:
    model = Net()
    view, _, wrapper = view_of(model)
    torch.testing.assert_close(view(X, shift=1.0), model(X, shift=1.0) + 100)
    assert wrapper.calls == 1
    model(X)
    assert wrapper.calls == 1


def test_it_is_the_users_class_in_name_and_kind() -> None:
    view, _, _ = view_of(Net())
    assert isinstance(view, Net)
    assert issubclass(type(view), Net)
    assert type(view).__module__ == Net.__module__
    assert type(view).__doc__ == Net.__doc__
    assert len(view) == 0
    assert repr(view).replace("PreparedNet", "Net") == repr(unwrap(view))


def test_attributes_are_one_and_the_same() -> None:
    model = Net()
    view, _, _ = view_of(model)
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


def test_nothing_is_set_on_the_users_module() -> None:
    model = Net()
    names, kind = set(vars(model)), type(model)
    kinds_names = set(vars(Net))
    view, _, _ = view_of(model)
    view(X)
    assert set(vars(model)) == names
    assert type(model) is kind
    assert set(vars(Net)) == kinds_names


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_run_once_a_call() -> None:
    model, seen = Net(), []
    view, _, _ = view_of(model)
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


# -- copies ------------------------------------------------------------------------------------------------------------


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def through_torch(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, through_pickle, through_torch])
def test_a_copy_is_the_plain_module(again: Callable[[nn.Module], nn.Module]) -> None:
    model = Net()
    view, _, _ = view_of(model)
    made = again(view)
    assert type(made) is Net
    assert made is not model
    torch.testing.assert_close(made(X), model(X))
    made.rate = 9.0
    assert model.rate == 0.5


class Counted(Net):
    """With copying and pickling of its own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Counted:
        made = Counted()
        made.load_state_dict(self.state_dict())
        made.copied = True
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pickled": True}


# -- classes that make it hard -----------------------------------------------------------------------------------------


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


def test_a_class_that_registers_its_subclasses() -> None:
    for _ in range(2):
        view, _, _ = view_of(Tagged())
        assert view(X).shape == (1, 2)
    assert Registered.register == {"tagged": Tagged}


class Holding(nn.Module):
    """Has what a wrapper of DistributedDataParallel has, by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 1)

    def no_sync(self) -> str:
        return "own"


def test_what_scripts_ask_of_the_wrapper_of_ddp() -> None:
    model, holding = Net(), Holding()
    view, route = make_view(model, Wrapper(model), no_sync=lambda: nullcontext("quiet"))
    assert view.module is model
    with view.no_sync() as inside:
        assert inside == "quiet"
    own, _, _ = view_of(holding)
    assert (own.module, own.no_sync()) == (holding.module, "own")
    assert not hasattr(model, "no_sync")
    assert route.original is model


# -- compiled and scripted ---------------------------------------------------------------------------------------------


# -- unwrap ------------------------------------------------------------------------------------------------------------


def test_unwrap() -> None:
    model = Net()
    view, _, _ = view_of(model)
    assert unwrap(view) is model
    assert unwrap(model) is model
    assert unwrap(nn.DataParallel(view)) is model
    again, _, _ = view_of(view)  # prepared for another run
    torch.testing.assert_close(again(X), model(X) + 200)
    assert unwrap(again) is model
    holder = nn.Sequential(view)
    assert unwrap(holder) is holder


# -- through the face --------------------------------------------------------------------------------------------------
