"""Programs written for apex.amp, with nothing but the import line changed; expected values are from Apex's table and rules."""

from __future__ import annotations

import copy
import gc
import importlib
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from easymp import EasympError, RefusedError
from easymp.compat import explain
from easymp.compat.apex import amp
from easymp.compat.apex.optimizers import FusedAdam

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LEVELS = ["O0", "O1", "O2", "O3"]
BY_LEVEL = pytest.mark.parametrize("level", LEVELS)
BOTH = pytest.mark.parametrize("level", ["O1", "O2"])


@pytest.fixture(autouse=True)
def as_before_initialize():
    yield
    amp.initialize(nn.Linear(1, 1), enabled=False)
    amp._amp_state.opt_properties = None


def net(seed=0, width=8):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2)).to(
        DEVICE
    )


def sgd(model, **how):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **how})


def initialize(models, optimizers=None, **how):
    return amp.initialize(models, optimizers, **{"verbosity": 0, **how})


def one(level="O2", value=1.0, lr=0.25, **how):
    """A model whose output is its only weight times its input."""
    model = nn.Linear(1, 1, bias=False).to(DEVICE)
    nn.init.constant_(model.weight, value)
    how = {"max_loss_scale": 1024.0, **how}  # 2**16 times 1 is no number in fp16
    return initialize(model, torch.optim.SGD(model.parameters(), lr=lr), opt_level=level, **how)


def backward(loss, optimizers, **how):
    with amp.scale_loss(loss, optimizers, **how) as scaled_loss:
        scaled_loss.backward()


def tensor(*numbers):
    return torch.tensor([numbers], device=DEVICE)


def digits():
    found = load_digits()
    x, y = torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)
    return x.to(DEVICE), y.to(DEVICE)


def train_digits(level, schedule=None, clip=None, epochs=5):
    """K1 and K2; the accuracy on what it was not trained on, losses of the first and last step, and the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)).to(DEVICE)
    optimizer, loss_fn = sgd(model, momentum=0.9), nn.CrossEntropyLoss()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4) if schedule == "before" else None
    if level is not None:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4) if schedule == "after" else scheduler
    x, y = digits()
    losses = []
    for _ in range(epochs):
        for i in range(0, 1500, 100):
            optimizer.zero_grad()
            loss = loss_fn(model(x[i : i + 100]), y[i : i + 100])
            if level is None:
                loss.backward()
            else:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(amp.master_params(optimizer), clip)
            optimizer.step()
            losses.append(loss.item())
        if scheduler is not None:
            scheduler.step()
    model.eval()
    with torch.no_grad():
        right = (model(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
    return right, losses[0], losses[-1], model


@pytest.fixture(scope="module")
def exact():
    return train_digits(None)


@BY_LEVEL
def test_the_program_trains_to_the_accuracy_of_fp32(level, exact, capsys):
    right, first, last, _ = train_digits(level)
    assert right >= exact[0] - 0.01
    assert last < first / 10
    assert f"Selected optimization level {level}" in capsys.readouterr().out


@pytest.mark.parametrize(("level", "schedule"), [("O1", "before"), ("O2", "before"), ("O2", "after")])
def test_with_schedulers_made_before_or_after_and_clipping(level, schedule):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's schedulers warn where they find another step than they know
        right, first, last, _ = train_digits(level, schedule, clip=1.0)
    assert right > 0.85
    assert last < first / 4


@BY_LEVEL
def test_checkpoints_are_fp32_at_every_level_and_go_from_one_to_another(level):
    model, optimizer = initialize(net(), None, opt_level=level), None
    saved = model.state_dict()
    assert {v.dtype for v in saved.values()} == {torch.float32, torch.int64}
    assert {v.dtype for v in model[0].state_dict().values()} == {torch.float32}
    for other in LEVELS:
        fresh = net(seed=1)
        optimizer = sgd(fresh)
        fresh, optimizer = initialize(fresh, optimizer, opt_level=other)
        fresh.load_state_dict(saved)
        for held in amp.master_params(optimizer):
            held.grad = torch.zeros_like(held)
        optimizer.step()  # masters have taken what was loaded
        for name, value in fresh.state_dict().items():
            assert torch.allclose(value, saved[name], atol=1e-3), (name, other)


NAMES = ("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "loss_scale")
TABLE = {
    "O0": (torch.float32, False, None, False, 1.0),
    "O1": (None, True, None, None, "dynamic"),
    "O2": (torch.float16, False, True, True, "dynamic"),
    "O3": (torch.float16, False, False, False, 1.0),
}
OVERRIDES = [
    ("O3", {"keep_batchnorm_fp32": "True"}, True),
    ("O2", {"keep_batchnorm_fp32": None}, True),
    ("O2", {"master_weights": False}, False),
    ("O2", {"loss_scale": "128.0"}, 128.0),
    ("O3", {"loss_scale": "dynamic"}, "dynamic"),
    ("O1", {"patch_torch_functions": "False"}, False),
    ("O1", {"cast_model_type": torch.float32}, None),
    ("O2", {"cast_model_type": torch.bfloat16}, torch.bfloat16),
]


@pytest.mark.parametrize(
    ("level", "given", "wanted"),
    [
        *((level, {}, dict(zip(NAMES, row))) for level, row in TABLE.items()),
        *((level, given, dict.fromkeys(given, wanted)) for level, given, wanted in OVERRIDES),
    ],
)
def test_properties_are_printed(capsys, level, given, wanted):
    amp.initialize(net(), opt_level=level, **given)
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith(f"Selected optimization level {level}: ")
    changed = [f"{name}={value!r}" for name, value in given.items() if value is not None]
    assert title.endswith(f", with {', '.join(changed)}." if changed else ".")
    found = dict(line.replace(" ", "").split(":") for line in lines)
    assert found == found | {name: str(value) for name, value in wanted.items()}
    initialize(net(), opt_level=level)
    assert capsys.readouterr().out == ""  # verbosity=0


def test_handle_is_a_module_of_amp():
    assert amp.handle is importlib.import_module("easymp.compat.apex.amp.handle")
    assert amp.handle.scale_loss is amp.scale_loss


def test_the_return_mirrors_what_was_given():
    a, s, t = net(), sgd(net()), sgd(net())
    assert initialize(a) is a and initialize([a]) == [a]
    assert initialize(a, s) == (a, s) and initialize(a, []) == (a, [])
    models, optimizers = [net(), net()], [sgd(a), t]
    assert initialize(models, optimizers) == (models, optimizers)
    assert isinstance(t, torch.optim.SGD) and type(t).__name__ == "SGD"


def initialized_twice():
    optimizer = sgd(net())
    initialize(net(), optimizer)
    initialize(net(), optimizer)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: initialize(net(), opt_level="O4"), "Unexpected optimization level 'O4'"),
        (lambda: initialize(net(), opt_level="01"), "the prefix O is the letter O"),
        (lambda: initialize(nn.DataParallel(net())), "instance of DataParallel. Parallel wrappers should"),
        (lambda: initialize(net().half()), "Found param 0.weight with type torch.float16"),
        (lambda: initialize(net().double()), "Found param 0.weight with type torch.float64"),
        (initialized_twice, "only be passed through amp.initialize once"),
        (lambda: initialize(net(), [s := sgd(net()), s]), "only be passed through amp.initialize once"),
        (lambda: initialize(net(), cast_model_type=torch.float16), "O1 inserts casts around torch's"),
        (lambda: initialize(net(), keep_batchnorm_fp32=True), "O1 runs batch-norm in fp32"),
        (lambda: initialize(net(), master_weights="False"), "O1's weights are fp32 themselves"),
        (lambda: initialize(net(), opt_level="O2", patch_torch_functions=True), "only opt_level='O1' casts"),
        (lambda: initialize(net(), opt_level="O2", keep_batchnorm_fp32="yes"), "a boolean, the string"),
        (lambda: initialize(net(), opt_level="O2", keep_batchnorm_fp32=1), "must be a boolean"),
        (lambda: initialize(net(), loss_scale="fast"), "must be a positive number, or 'dynamic'"),
        (lambda: initialize(net(), loss_scale=-1), "must be a positive number, or 'dynamic'"),
        (lambda: initialize(net(), opt_level="O2", cast_model_type="half"), "cast_model_type='half' is not"),
    ],
)
def test_what_is_refused(call, words):
    with pytest.raises(RuntimeError) as error:  # Apex's type, too
        call()
    assert words in str(error.value) and isinstance(error.value, EasympError)


def test_wrong_types_and_bounds_change_nothing():
    model, optimizer = net(), sgd(net())
    with pytest.raises(TypeError, match="models must be either"):
        initialize((model,))
    with pytest.raises(TypeError, match="optimizers must be either"):
        initialize(model, "sgd")
    with pytest.raises(EasympError, match=r"33554432\.0"):
        initialize(model, optimizer, min_loss_scale=2.0**25)
    with pytest.raises(RuntimeError, match="Found param"):
        initialize([model, net().half()], optimizer, opt_level="O2")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert type(optimizer) is torch.optim.SGD


def test_turned_off_it_changes_nothing():
    initialize(model := net())
    optimizer = sgd(model)
    assert initialize(model, optimizer, enabled=False) == (model, optimizer)
    assert type(optimizer) is torch.optim.SGD
    loss = model(torch.randn(3, 4, device=DEVICE)).sum()
    with amp.scale_loss(loss, optimizer) as same:
        assert same is loss and loss.dtype == torch.float32
    assert amp.state_dict() == {}


@pytest.mark.parametrize(
    ("level", "how", "weight", "norm", "output"),
    [
        ("O0", {}, torch.float32, torch.float32, torch.float32),
        ("O1", {}, torch.float32, torch.float32, torch.float16),
        ("O2", {}, torch.float16, torch.float32, torch.float32),
        ("O3", {}, torch.float16, torch.float16, torch.float32),
        ("O3", {"keep_batchnorm_fp32": "True"}, torch.float16, torch.float32, torch.float32),
        ("O2", {"keep_batchnorm_fp32": False}, torch.float16, torch.float16, torch.float32),
        ("O2", {"cast_model_type": torch.bfloat16}, torch.bfloat16, torch.float32, torch.float32),
        ("O2", {"cast_model_outputs": torch.float16}, torch.float16, torch.float32, torch.float16),
        ("O1", {"cast_model_outputs": torch.float32}, torch.float32, torch.float32, torch.float32),
        ("O1", {"patch_torch_functions": False}, torch.float32, torch.float32, torch.float32),
    ],
)
def test_types_of_parameters_and_outputs(level, how, weight, norm, output):
    model = initialize(net(), opt_level=level, **how)
    assert (model[0].weight.dtype, model[1].weight.dtype, model[1].running_var.dtype) == (weight, norm, norm)
    assert model(torch.randn(3, 4, device=DEVICE)).dtype == output


def test_scales_begin_at_65536_and_have_bounds():
    initialize(net())
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}}
    one("O1", max_loss_scale=1024.0)
    assert amp._amp_state.loss_scalers[0].loss_scale() == 1024.0
    model, optimizer = one("O2", min_loss_scale=32768.0, max_loss_scale=2.0**24, lr=0.0)
    for _ in range(2):
        backward(model(tensor(1.0)).sum() * float("inf"), optimizer)
        optimizer.step()
        assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 32768.0
    model, optimizer = one("O2", max_loss_scale=65536.0, lr=0.0)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 1999}})
    backward(model(tensor(1.0)).sum() * 0.25, optimizer)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 65536.0, "unskipped": 0}


def test_an_overflow_skips_the_next_step_of_every_optimizer_given_and_says_so(capsys):
    models = [nn.Linear(1, 1, bias=False).to(DEVICE) for _ in range(3)]
    how = {"opt_level": "O2", "verbosity": 1, "max_loss_scale": 1024.0}
    models, optimizers = amp.initialize(models, [sgd(m) for m in models], **how)
    capsys.readouterr()
    before = [m.weight.item() for m in models]
    backward(sum(m(tensor(1.0)) for m in models[:2]).sum() * float("inf"), optimizers[:2])
    backward(models[2](tensor(1.0)).sum(), optimizers[2])
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    said = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 512.0\n"
    assert capsys.readouterr().out == said * 2
    after = [m.weight.item() for m in models]
    assert [a == b for a, b in zip(after, before)] == [True, True, False]
    backward(sum(m(tensor(1.0)) for m in models[:2]).sum(), optimizers[:2])
    optimizers[0].step()  # only one step was skipped
    assert models[0].weight.item() != before[0]


def test_a_scale_that_was_given_stays_and_skips_nothing():
    model, optimizer = one("O2", loss_scale=8.0)
    backward(model(tensor(2.0)).sum(), optimizer)
    optimizer.step()
    assert model.weight.item() == 0.5  # 1 - 0.25 × 2
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}}
    optimizer.zero_grad()
    backward(model(tensor(1.0)).sum() * float("inf"), optimizer)
    optimizer.step()
    assert not torch.isfinite(model.weight).any()


def test_states_come_back(capsys):
    one("O2", num_losses=3)
    amp.load_state_dict({f"loss_scaler{i}": {"loss_scale": 2.0**i, "unskipped": i} for i in range(3)})
    saved = copy.deepcopy(amp.state_dict())
    assert list(saved) == ["loss_scaler0", "loss_scaler1", "loss_scaler2"]
    one("O1", num_losses=3)
    amp.load_state_dict(saved)
    assert amp.state_dict() == saved
    amp.initialize(net(), verbosity=1)
    capsys.readouterr()
    amp.load_state_dict(saved)
    assert "state_dict contains 3 entries, while 1 loss_scalers are used" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="unexpected keys in amp's state_dict: 'model'"):
        amp.load_state_dict({"model": {}})


@BY_LEVEL
def test_blocks_before_a_step_add_up(level):
    model, optimizer = one(level)
    for x, total in ((1.0, 1.0), (2.0, 3.0), (4.0, 7.0)):
        backward(model(tensor(x)).sum(), optimizer)
        assert [p.grad.item() for p in amp.master_params(optimizer)] == [total]
    optimizer.step()
    assert model.weight.item() == 1 - 0.25 * 7


@BOTH
def test_with_delay_unscale_the_last_block_divides_all(level):
    model, optimizer = one(level, loss_scale=4.0)
    backward(model(tensor(1.0)).sum(), optimizer)
    backward(model(tensor(2.0)).sum(), optimizer, delay_unscale=True)
    assert model.weight.grad.item() == 8.0
    with pytest.raises(RuntimeError, match="leave delay_unscale=True out"):
        optimizer.step()
    backward(model(tensor(4.0)).sum(), optimizer)
    assert [p.grad.item() for p in amp.master_params(optimizer)] == [7.0]
    optimizer.step()
    assert model.weight.item() == 1 - 0.25 * 7
    optimizer.zero_grad()
    backward(model(tensor(2.0)).sum(), optimizer, delay_unscale=True)
    optimizer.zero_grad()
    backward(model(tensor(2.0)).sum(), optimizer)
    assert [p.grad.item() for p in amp.master_params(optimizer)] == [2.0]
    model, optimizer = one(level, num_losses=2)
    backward(model(tensor(1.0)).sum(), optimizer, delay_unscale=True)
    with pytest.raises(RuntimeError, match="loss_id=0 are waiting"):
        backward(model(tensor(1.0)).sum(), optimizer, loss_id=1)


@BOTH
def test_several_models_optimizers_and_losses(level):
    a, b = models = [nn.Linear(1, 1, bias=False).to(DEVICE) for _ in range(2)]
    for m in models:
        nn.init.constant_(m.weight, 1.0)
    how = {"opt_level": level, "num_losses": 3, "max_loss_scale": 64.0}
    _, optimizers = initialize(models, [sgd(m, lr=0.25) for m in models], **how)
    backward(a(tensor(1.0)).sum(), optimizers[0], loss_id=0)
    backward(b(tensor(2.0)).sum() * float("inf"), optimizers[1], loss_id=1)
    backward((a(tensor(1.0)) + b(tensor(1.0))).sum(), optimizers, loss_id=2)
    for optimizer in optimizers:
        optimizer.step()
    assert (a.weight.item(), b.weight.item()) == (0.5, 1.0)
    found = [s["loss_scale"] for s in amp.state_dict().values()]
    assert found == [64.0, 32.0, 64.0]
    with pytest.raises(RuntimeError, match=r"loss_id=3, and there are 3 loss scalers: pass"):
        backward(a(tensor(1.0)).sum(), optimizers[0], loss_id=3)


@BOTH
def test_an_optimizer_that_was_not_given_does_not_step_on_scaled_gradients(level):
    a, b = (nn.Linear(1, 1, bias=False).to(DEVICE) for _ in range(2))
    _, (first, second) = initialize([a, b], [sgd(a), sgd(b)], opt_level=level)
    backward(b(a(tensor(1.0))).sum(), first)
    first.step()
    with pytest.raises(RuntimeError, match="every optimizer whose parameters"):
        second.step()
    second.zero_grad()  # as in a GAN, whose generator's loss goes through the discriminator
    backward(b(a(tensor(1.0)).detach()).sum(), second)
    second.step()


def test_scale_loss_says_what_it_needs():
    with pytest.raises(RuntimeError, match="internal Amp state has not been initialized"):
        backward(torch.zeros(()), None)
    model, optimizer = one("O2")
    loss = model(tensor(1.0)).sum()
    for error, words, given, how in (
        (RuntimeError, r"scale_loss\(1\.0, …\): a float has no backward", (1.0, optimizer), {}),
        (RuntimeError, "this SGD was not passed to amp.initialize", (loss, sgd(net())), {}),
        (RefusedError, "delay_overflow_check", (loss, optimizer), {"delay_overflow_check": True}),
    ):
        with pytest.raises(error, match=words):
            backward(*given, **how)
    with pytest.raises(RuntimeError, match="does not support closure"):
        optimizer.step(lambda: 0.0)
    loss.backward()
    with pytest.raises(RuntimeError, match=r"did not come by amp.scale_loss"):
        optimizer.step()


@BOTH
def test_a_block_that_fails_leaves_what_was_there(level):
    model, optimizer = one(level)
    backward(model(tensor(3.0)).sum(), optimizer)
    scaled = amp.scale_loss(model(tensor(1.0)).sum(), optimizer)
    scaled.__enter__().backward()
    assert not scaled.__exit__(ValueError, ValueError(), None)
    assert [p.grad.item() for p in amp.master_params(optimizer)] == [3.0]


def test_o2_holds_fp32_masters_of_half_parameters_and_the_others_themselves():
    model = net()
    given = list(model.parameters())
    model, optimizer = initialize(model, sgd(model), opt_level="O2")
    masters = list(amp.master_params(optimizer))
    assert {m.dtype for m in masters} == {torch.float32} and list(model.parameters()) == given
    assert [m is p for m, p in zip(masters, given)] == [False, False, True, True, False, False]


def test_the_optimizers_own_ways_stay():
    model, optimizer = one("O2")
    extra = nn.Parameter(torch.ones(1, dtype=torch.float16, device=DEVICE))
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    assert [p.dtype for p in amp.master_params(optimizer)] == [torch.float32] * 2
    optimizer.load_state_dict(optimizer.state_dict())
    backward(model(tensor(2.0)).sum() + extra.sum(), optimizer)
    optimizer.step()
    assert calls == ["before"]
    assert (model.weight.item(), extra.item()) == (0.5, 0.5)
    optimizer.zero_grad(set_to_none=False)
    backward(model(tensor(1.0)).sum(), optimizer)
    model.zero_grad()
    optimizer.step()
    assert model.weight.item() == 0.25
    plain, closing = one("O0")
    assert closing.step(lambda: plain(tensor(1.0)).sum()).item() == 1.0


def made(*shape, dtype=torch.float32):
    return torch.rand(shape, device=DEVICE).to(dtype)


def test_torchs_functions_cast_from_initialize_on():
    x, h = made(3, 3), made(3, 3, dtype=torch.float16)
    model = nn.LSTM(3, 3).to(DEVICE)
    initialize(model)
    assert F.linear(x, x).dtype == model(x)[0].dtype == torch.float16
    assert torch.softmax(h, 0).dtype == torch.cat([x, h]).dtype == torch.float32
    assert (F.relu(h).dtype, F.relu(x).dtype) == (torch.float16, torch.float32)
    with amp.disable_casts():
        assert F.linear(x, x).dtype == torch.float32
    assert F.linear(x, x).dtype == torch.float16
    initialize(net(), opt_level="O0")
    assert F.linear(x, x).dtype == torch.float32


def test_functions_of_users_join_the_lists(monkeypatch):
    def twice(a, b=None):
        return a if b is None else a + b

    half, wide, promoted = amp.half_function(twice), amp.float_function(twice), amp.promote_function(twice)
    registered = {"sigmoid": amp.register_half_function, "bmm": amp.register_float_function}
    registered["mul"] = amp.register_promote_function
    for name, register in registered.items():
        monkeypatch.setattr(torch, name, getattr(torch, name))  # puts them back
        register(torch, name)
    x, h = made(2, 2), made(2, 2, dtype=torch.float16)
    assert half(x).dtype == wide(x).dtype == torch.float32  # before initialize
    initialize(net())
    assert half(x).dtype == promoted(h, b=h).dtype == torch.sigmoid(x).dtype == torch.float16
    assert wide(h).dtype == promoted(h, b=x).dtype == torch.mul(h, x).dtype == torch.float32
    assert torch.bmm(h[None], h[None]).dtype == torch.float32  # what users say counts more than the list
    with amp.disable_casts():
        assert half(x).dtype == torch.float32
    with pytest.raises(ValueError, match="No function named nothing in module"):
        amp.register_half_function(torch, "nothing")


def test_optimizers_step_without_casts():
    seen = []

    class Products(torch.optim.SGD):
        def step(self, closure=None):
            seen.append((torch.ones(2, 2, device=DEVICE) @ torch.ones(2, 2, device=DEVICE)).dtype)
            return super().step(closure)

    model = nn.Linear(1, 1).to(DEVICE)
    model, optimizer = initialize(model, Products(model.parameters(), lr=0.1), max_loss_scale=64.0)
    backward(model(tensor(1.0)).sum(), optimizer)
    optimizer.step()
    assert seen == [torch.float32]


@BOTH
@pytest.mark.parametrize("kind", [torch.optim.SGD, FusedAdam])
def test_a_model_and_its_optimizer_are_freed_without_the_garbage_collector(level, kind):
    model = net()
    model, optimizer = initialize(model, kind(model.parameters(), lr=0.1), opt_level=level)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model(torch.ones(3, 4, device=DEVICE)).float().mean(), optimizer)
        optimizer.step()
        scheduler.step()
    held = [weakref.ref(item) for item in (model, optimizer, *amp.master_params(optimizer))]
    gc.collect()
    gc.disable()
    try:
        del model, optimizer, scheduler
        assert [ref() for ref in held] == [None] * len(held)
    finally:
        gc.enable()


def test_casts_alone_by_init(capsys):
    handle = amp.init(patch_type=torch.bfloat16)
    assert handle.is_active() and handle is amp._amp_state.handle
    assert F.linear(made(2, 2), made(2, 2)).dtype == torch.bfloat16
    with pytest.raises(NotImplementedError, match=r"binary_cross_entropy on torch\.bfloat16"):
        F.binary_cross_entropy(made(2, 2, dtype=torch.bfloat16), made(2, 2))
    amp.init(allow_banned=True)
    assert F.binary_cross_entropy(made(2, 2).half(), made(2, 2)).dtype == torch.float32
    handle._deactivate()
    assert not amp.init(enabled=False).is_active() and F.linear(made(2, 2), made(2, 2)).dtype == torch.float32
    with pytest.raises(ValueError, match=r"no longer supported: use amp\.initialize"):
        handle.scale_loss(None, None)


@BOTH
def test_models_in_two_types_stay_so_with_cast_model_type_false(level):
    model = nn.Sequential(nn.Linear(2, 2).half(), nn.Linear(2, 2)).to(DEVICE)
    amp._amp_state.allow_incoming_model_not_fp32 = True
    try:
        initialize(model, sgd(model), opt_level=level, cast_model_type=False)
    finally:
        amp._amp_state.allow_incoming_model_not_fp32 = False
    assert (model[0].weight.dtype, model[1].weight.dtype) == (torch.float16, torch.float32)
    amp._amp_state.loss_scalers[0]._loss_scale = 4.0  # as scripts set it
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 4.0, "unskipped": 0}}
    assert amp._amp_state.opt_properties.loss_scale == "dynamic"


def test_names_that_are_not_here_and_the_native_lines(capsys):
    with pytest.raises(ImportError, match=r"amp.NoOpHandle is not part of easymp.compat: use amp.initialize"):
        importlib.import_module("easymp.compat.apex.amp").NoOpHandle  # noqa: B018
    one("O2")
    assert 'acc = Accelerator(mixed_precision="O2")' in explain()
    assert "# Apex → easymp" in capsys.readouterr().out
