"""Programs written for apex.amp, with nothing but the import line changed.

Expected values are from Apex's table and rules.
"""

from __future__ import annotations

import copy
import gc
import importlib
import math
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from easymp import EasympError, RefusedError
from easymp.compat.apex import amp
from easymp.compat.apex.optimizers import FusedAdam

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LEVELS = ["O0", "O1", "O2", "O3"]
BOTH = pytest.mark.parametrize("level", ["O1", "O2"])


@pytest.fixture(autouse=True)
def as_before_initialize():
    yield
    amp.initialize(nn.Linear(1, 1), enabled=False)
    amp._amp_state.opt_properties = None


def net(seed=0, width=8):
    torch.manual_seed(seed)
    layers = nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2)
    return nn.Sequential(*layers).to(DEVICE)


def weight():
    """A model whose output is its only weight, which is 1, times its input."""
    model = nn.Linear(1, 1, bias=False).to(DEVICE)
    nn.init.ones_(model.weight)
    return model


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.25, **options})


def initialize(models, optimizers=None, **options):
    return amp.initialize(models, optimizers, **{"verbosity": 0, **options})


def one(level="O2", lr=0.25, **options):
    model = weight()
    options = {"max_loss_scale": 1024.0, **options}  # 2**16 times 1 is no number in fp16
    return initialize(model, sgd(model, lr=lr), opt_level=level, **options)


def backward(loss, optimizers, **options):
    with amp.scale_loss(loss, optimizers, **options) as scaled_loss:
        scaled_loss.backward()


def tensor(*numbers):
    return torch.tensor([numbers], device=DEVICE)


def masters(optimizer):
    return list(amp.master_params(optimizer))


def network():
    return nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)).to(DEVICE)


def train_digits(level, schedule=None, clip=None, make_model=network, wrap=None, rank=0, size=1):
    """K1 and K2; the accuracy on what it was not trained on, losses of the first and last step, and the model."""
    torch.manual_seed(rank)
    model = make_model()
    optimizer, loss_fn = sgd(model, lr=0.1, momentum=0.9), nn.CrossEntropyLoss()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4) if schedule == "before" else None
    if level is not None:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4) if schedule == "after" else scheduler
    model, digits, losses = wrap(model) if wrap else model, load_digits(), []
    x = torch.tensor(digits.data, dtype=torch.float32, device=DEVICE) / 16
    y = torch.tensor(digits.target, device=DEVICE)
    for _ in range(5):
        for i in range(rank * 100 // size, 1500, 100):
            optimizer.zero_grad()
            loss = loss_fn(model(x[i : i + 100 // size]), y[i : i + 100 // size])
            if level is None:
                loss.backward()
            else:
                backward(loss, optimizer)
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


def test_the_program_trains_to_the_accuracy_of_fp32(capsys):
    exact = train_digits(None)[0]
    for level in LEVELS:
        right, first, last, _ = train_digits(level)
        assert right >= exact - 0.01 and last < first / 10
        assert f"Selected optimization level {level}" in capsys.readouterr().out
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's schedulers warn where they find another step than they know
        for level, schedule in ("O1", "before"), ("O2", "before"), ("O2", "after"):
            right, first, last, _ = train_digits(level, schedule, clip=1.0)
            assert right > 0.85 and last < first / 4


@pytest.mark.parametrize("level", LEVELS)
def test_checkpoints_are_fp32_at_every_level_and_go_from_one_to_another(level):
    model = initialize(net(), opt_level=level)
    saved = model.state_dict()
    assert {v.dtype for v in saved.values()} == {torch.float32, torch.int64}
    assert {v.dtype for v in model[0].state_dict().values()} == {torch.float32}
    for other_level in LEVELS:
        fresh = net(seed=1)
        fresh, optimizer = initialize(fresh, sgd(fresh), opt_level=other_level)
        fresh.load_state_dict(saved)
        for parameter in amp.master_params(optimizer):
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # masters have taken what was loaded
        for name, value in fresh.state_dict().items():
            assert torch.allclose(value, saved[name], atol=1e-3), (name, other_level)


def test_the_return_mirrors_what_was_given():
    a, s, t = net(), sgd(net()), sgd(net())
    assert initialize(a) is a and initialize([a]) == [a]
    assert initialize(a, s) == (a, s) and initialize(a, []) == (a, [])
    models, optimizers = [net(), net()], [sgd(a), t]
    assert initialize(models, optimizers) == (models, optimizers)
    assert isinstance(t, torch.optim.SGD) and type(t).__name__ == "SGD"
    with pytest.raises(RuntimeError, match=r"only be passed through amp\.initialize once"):
        initialize(net(), s)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: initialize(net(), opt_level="O4"), "Unexpected optimization level 'O4'"),
        (lambda: initialize(net(), opt_level="01"), "the prefix O is the letter O"),
        (lambda: initialize(nn.DataParallel(net())), "instance of DataParallel. Parallel wrappers should"),
        (lambda: initialize(net().half()), "Found param 0.weight with type torch.float16"),
        (lambda: initialize(net(), [s := sgd(net()), s]), "only be passed through amp.initialize once"),
        (lambda: initialize(net(), cast_model_type=torch.float16), "O1 inserts casts around torch's"),
        (lambda: initialize(net(), keep_batchnorm_fp32=True), "O1 runs batch-norm in fp32"),
        (lambda: initialize(net(), master_weights="False"), "O1's weights are fp32 themselves"),
        (lambda: initialize(net(), opt_level="O2", patch_torch_functions=True), "only opt_level='O1' casts"),
        (lambda: initialize(net(), opt_level="O2", keep_batchnorm_fp32="yes"), "a boolean, the string"),
        (lambda: initialize(net(), opt_level="O2", keep_batchnorm_fp32=1), "must be a boolean"),
        (lambda: initialize(net(), loss_scale="fast"), "must be a positive number, or 'dynamic'"),
        (lambda: initialize(net(), loss_scale=-1), "must be a positive number, or 'dynamic'"),
        (lambda: initialize(net(), loss_scale=True), "must be a positive number, or 'dynamic'"),
        (lambda: initialize(net(), opt_level="O2", cast_model_type="half"), "cast_model_type='half' is not"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(RuntimeError) as error:  # Apex's type, too
        call()
    assert message in str(error.value) and isinstance(error.value, EasympError)


def test_what_is_refused_or_turned_off_changes_nothing():
    model, optimizer = net(), sgd(net())
    for arguments, options, error, message in (
        (((model,),), {}, TypeError, "models must be either"),
        ((model, "sgd"), {}, TypeError, "optimizers must be either"),
        ((model, optimizer), {"min_loss_scale": 2.0**25}, EasympError, r"33554432\.0"),
        (([model, net().half()], optimizer), {"opt_level": "O2"}, RuntimeError, "Found param"),
    ):
        with pytest.raises(error, match=message):
            initialize(*arguments, **options)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    initialize(net())
    assert initialize(model, optimizer, enabled=False) == (model, optimizer)
    assert type(optimizer) is torch.optim.SGD
    loss = model(torch.randn(3, 4, device=DEVICE)).sum()
    with amp.scale_loss(loss, optimizer) as same:
        assert same is loss and loss.dtype == torch.float32
    assert amp.state_dict() == {}


PROPERTIES = "cast_model_type patch_torch_functions keep_batchnorm_fp32 master_weights loss_scale".split()
HALF, FULL, BF16, DYNAMIC = torch.float16, torch.float32, torch.bfloat16, "dynamic"


@pytest.mark.parametrize(
    ("level", "options", "properties", "weight", "norm", "output"),
    [
        ("O0", {}, (FULL, False, None, False, 1.0), FULL, FULL, FULL),
        ("O1", {}, (None, True, None, None, DYNAMIC), FULL, FULL, HALF),
        ("O2", {}, (HALF, False, True, True, DYNAMIC), HALF, FULL, FULL),
        ("O3", {}, (HALF, False, False, False, 1.0), HALF, HALF, FULL),
        ("O3", {"keep_batchnorm_fp32": "True"}, (HALF, False, True, False, 1.0), HALF, FULL, FULL),
        ("O2", {"keep_batchnorm_fp32": False}, (HALF, False, False, True, DYNAMIC), HALF, HALF, FULL),
        ("O2", {"keep_batchnorm_fp32": None}, (HALF, False, True, True, DYNAMIC), HALF, FULL, FULL),
        ("O2", {"master_weights": False}, (HALF, False, True, False, DYNAMIC), HALF, FULL, FULL),
        ("O2", {"loss_scale": "128.0"}, (HALF, False, True, True, 128.0), HALF, FULL, FULL),
        ("O3", {"loss_scale": DYNAMIC}, (HALF, False, False, False, DYNAMIC), HALF, HALF, FULL),
        ("O2", {"cast_model_type": BF16}, (BF16, False, True, True, DYNAMIC), BF16, FULL, FULL),
        ("O2", {"cast_model_outputs": HALF}, (HALF, False, True, True, DYNAMIC), HALF, FULL, HALF),
        ("O1", {"cast_model_outputs": FULL}, (None, True, None, None, DYNAMIC), FULL, FULL, FULL),
        ("O1", {"cast_model_type": FULL}, (None, True, None, None, DYNAMIC), FULL, FULL, HALF),
        ("O1", {"patch_torch_functions": "False"}, (None, False, None, None, DYNAMIC), FULL, FULL, FULL),
    ],
)
def test_properties_are_printed_and_types_follow(capsys, level, options, properties, weight, norm, output):
    model = amp.initialize(net(), opt_level=level, **options)
    assert (model[0].weight.dtype, model[1].weight.dtype, model[1].running_var.dtype) == (weight, norm, norm)
    assert model(torch.randn(3, 4, device=DEVICE)).dtype == output
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == f"Selected optimization level {level}, whose properties are:"
    printed = dict(line.replace(" ", "").split(":") for line in lines)
    assert [printed[name] for name in PROPERTIES] == [str(value) for value in properties]
    initialize(net(), opt_level=level)
    assert capsys.readouterr().out == ""  # verbosity=0


def test_scales_begin_at_65536_and_have_bounds():
    initialize(net())
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}}
    one("O1", max_loss_scale=1024.0)
    assert amp._amp_state.loss_scalers[0].loss_scale() == 1024.0
    model, optimizer = one("O2", min_loss_scale=32768.0, max_loss_scale=2.0**24, lr=0.0)
    for _ in range(2):
        backward(model(tensor(1.0)).sum() * math.inf, optimizer)
        optimizer.step()
        assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 32768.0
    model, optimizer = one("O2", max_loss_scale=65536.0, lr=0.0)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 1999}})
    backward(model(tensor(1.0)).sum() * 0.25, optimizer)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 65536.0, "unskipped": 0}


def test_an_overflow_skips_the_next_step_of_every_optimizer_given_and_says_so(capsys):
    models = [weight() for _ in range(3)]
    options = {"opt_level": "O2", "verbosity": 1, "max_loss_scale": 1024.0}
    models, optimizers = amp.initialize(models, [sgd(m) for m in models], **options)
    capsys.readouterr()
    backward(sum(m(tensor(1.0)) for m in models[:2]).sum() * math.inf, optimizers[:2])
    backward(models[2](tensor(1.0)).sum(), optimizers[2])
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    line = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 512.0\n"
    assert capsys.readouterr().out == line * 2
    assert [m.weight.item() for m in models] == [1.0, 1.0, 0.75]
    backward(sum(m(tensor(1.0)) for m in models[:2]).sum(), optimizers[:2])
    optimizers[0].step()  # only one step was skipped
    assert models[0].weight.item() == 0.75


def test_a_scale_that_was_given_stays_and_skips_nothing():
    model, optimizer = one("O2", loss_scale=8.0)
    backward(model(tensor(2.0)).sum(), optimizer)
    optimizer.step()
    assert model.weight.item() == 0.5  # 1 - 0.25 × 2
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}}
    optimizer.zero_grad()
    backward(model(tensor(1.0)).sum() * math.inf, optimizer)
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


@pytest.mark.parametrize("level", LEVELS)
def test_blocks_before_a_step_add_up_and_one_that_fails_is_refused_until_zero_grad(level):
    model, optimizer = one(level)
    for x, total in ((1.0, 1.0), (2.0, 3.0), (4.0, 7.0)):
        backward(model(tensor(x)).sum(), optimizer)
        assert [p.grad.item() for p in masters(optimizer)] == [total]
    optimizer.step()
    assert model.weight.item() == 1 - 0.25 * 7
    if level in ("O1", "O2"):
        optimizer.zero_grad()
        scaled = amp.scale_loss(model(tensor(1.0)).sum(), optimizer)
        scaled.__enter__().backward()
        assert not scaled.__exit__(ValueError, ValueError(), None)
        with pytest.raises(RuntimeError, match="did not come by" if level == "O2" else "block that failed"):
            optimizer.step()
        optimizer.zero_grad()
        backward(model(tensor(1.0)).sum(), optimizer)
        optimizer.step()
        assert model.weight.item() == 1 - 0.25 * 8


@BOTH
@pytest.mark.parametrize("delay", [False, True])
def test_a_block_that_fails_before_its_backward_loses_no_earlier_gradient(level, delay):
    model, optimizer = one(level)
    with amp.scale_loss(model(tensor(1.0)).sum(), optimizer, delay_unscale=delay) as scaled:
        scaled.backward()
    with pytest.raises(KeyError), amp.scale_loss(model(tensor(2.0)).sum(), optimizer):
        raise KeyError
    if delay:  # its gradients are still scaled
        with pytest.raises(RuntimeError, match="block that failed"):
            backward(model(tensor(2.0)).sum(), optimizer)
        return
    backward(model(tensor(2.0)).sum(), optimizer)
    optimizer.step()
    assert model.weight.item() == 1 - 0.25 * 3


@BOTH
def test_with_delay_unscale_the_last_block_divides_all(level):
    model, optimizer = one(level, loss_scale=4.0)
    backward(model(tensor(1.0)).sum(), optimizer)
    backward(model(tensor(2.0)).sum(), optimizer, delay_unscale=True)
    assert model.weight.grad.item() == 8.0
    with pytest.raises(RuntimeError, match="leave delay_unscale=True out"):
        optimizer.step()
    backward(model(tensor(4.0)).sum(), optimizer)
    assert [p.grad.item() for p in masters(optimizer)] == [7.0]
    optimizer.step()
    assert model.weight.item() == 1 - 0.25 * 7
    optimizer.zero_grad()
    backward(model(tensor(2.0)).sum(), optimizer, delay_unscale=True)
    optimizer.zero_grad()
    backward(model(tensor(2.0)).sum(), optimizer)
    assert [p.grad.item() for p in masters(optimizer)] == [2.0]
    model, optimizer = one(level, num_losses=2)
    backward(model(tensor(1.0)).sum(), optimizer, delay_unscale=True)
    with pytest.raises(RuntimeError, match="loss_id=0 are waiting"):
        backward(model(tensor(1.0)).sum(), optimizer, loss_id=1)


@BOTH
def test_several_models_optimizers_and_losses(level):
    a, b = weight(), weight()
    options = {"opt_level": level, "num_losses": 3, "max_loss_scale": 64.0}
    _, (first, second) = initialize([a, b], [sgd(a), sgd(b)], **options)
    backward(a(tensor(1.0)).sum(), first, loss_id=0)
    backward(b(tensor(2.0)).sum() * math.inf, second, loss_id=1)
    backward((a(tensor(1.0)) + b(tensor(1.0))).sum(), [first, second], loss_id=2)
    first.step()
    second.step()
    assert (a.weight.item(), b.weight.item()) == (0.5, 1.0)
    assert [s["loss_scale"] for s in amp.state_dict().values()] == [64.0, 32.0, 64.0]
    with pytest.raises(RuntimeError, match=r"loss_id=3, and there are 3 loss scalers: pass"):
        backward(a(tensor(1.0)).sum(), first, loss_id=3)
    for optimizer in (first, second):
        optimizer.zero_grad()
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
    for error, message, arguments, options in (
        (RuntimeError, r"scale_loss\(1\.0, …\): a float has no backward", (1.0, optimizer), {}),
        (RuntimeError, "this SGD was not passed to amp.initialize", (loss, sgd(net())), {}),
        (RefusedError, "delay_overflow_check", (loss, optimizer), {"delay_overflow_check": True}),
    ):
        with pytest.raises(error, match=message):
            backward(*arguments, **options)
    with pytest.raises(RuntimeError, match="does not support closure"):
        optimizer.step(lambda: 0.0)
    loss.backward()
    with pytest.raises(RuntimeError, match=r"did not come by amp.scale_loss"):
        optimizer.step()
    plain, closing = one("O0")
    assert closing.step(lambda: plain(tensor(1.0)).sum()).item() == 1.0


def test_o2_holds_fp32_masters_of_half_parameters_and_the_others_themselves():
    model = net()
    parameters = list(model.parameters())
    model, optimizer = initialize(model, sgd(model), opt_level="O2")
    master_params = masters(optimizer)
    assert {m.dtype for m in master_params} == {torch.float32} and list(model.parameters()) == parameters
    assert [m is p for m, p in zip(master_params, parameters)] == [False, False, True, True, False, False]


def test_the_optimizers_own_ways_stay():
    model, optimizer = one("O2")
    extra = nn.Parameter(torch.ones(1, dtype=torch.float16, device=DEVICE))
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    assert [p.dtype for p in masters(optimizer)] == [torch.float32] * 2
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


def random_tensor(*shape, dtype=torch.float32):
    return torch.rand(shape, device=DEVICE).to(dtype)


def test_torchs_functions_cast_from_initialize_on_but_not_within_a_step():
    x, h, dtypes = random_tensor(3, 3), random_tensor(3, 3, dtype=torch.float16), []

    class Products(torch.optim.SGD):
        def step(self, closure=None):
            dtypes.append((x @ x).dtype)
            return super().step(closure)

    model = nn.LSTM(3, 3).to(DEVICE)
    model, optimizer = initialize(model, Products(model.parameters(), lr=0.1), max_loss_scale=64.0)
    assert F.linear(x, x).dtype == model(x)[0].dtype == torch.float16
    assert torch.softmax(h, 0).dtype == torch.cat([x, h]).dtype == torch.float32
    assert (F.relu(h).dtype, F.relu(x).dtype) == (torch.float16, torch.float32)
    with amp.disable_casts():
        assert F.linear(x, x).dtype == torch.float32
    assert F.linear(x, x).dtype == torch.float16
    backward(sum(p.sum() for p in model.parameters()), optimizer)
    optimizer.step()
    assert dtypes == [torch.float32]
    initialize(net(), opt_level="O0")
    assert F.linear(x, x).dtype == torch.float32
    with torch.autocast(DEVICE, torch.bfloat16), amp.disable_casts():  # of O1, which is off, and of nothing else
        assert F.linear(x, x).dtype == torch.bfloat16


def test_functions_of_users_join_the_lists(monkeypatch):
    def twice(a, b=None):
        return a if b is None else a + b

    half_twice, wide, promoted = amp.half_function(twice), amp.float_function(twice), amp.promote_function(twice)
    registered = {"sigmoid": amp.register_half_function, "bmm": amp.register_float_function}
    registered["mul"] = amp.register_promote_function
    for name, register in registered.items():
        monkeypatch.setattr(torch, name, getattr(torch, name))  # puts them back
        register(torch, name)
    x, h = random_tensor(2, 2), random_tensor(2, 2, dtype=torch.float16)
    assert half_twice(x).dtype == wide(x).dtype == torch.float32  # before initialize
    initialize(net())
    assert half_twice(x).dtype == promoted(h, b=h).dtype == torch.sigmoid(x).dtype == torch.float16
    assert wide(h).dtype == promoted(h, b=x).dtype == torch.mul(h, x).dtype == torch.float32
    assert torch.bmm(h[None], h[None]).dtype == torch.float32  # what users say counts more than the list
    with amp.disable_casts():
        assert half_twice(x).dtype == torch.float32
    with pytest.raises(ValueError, match="No function named nothing in module"):
        amp.register_half_function(torch, "nothing")


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
    references = [weakref.ref(item) for item in (model, optimizer, *amp.master_params(optimizer))]
    gc.collect()
    gc.disable()
    try:
        del model, optimizer, scheduler
        assert [ref() for ref in references] == [None] * len(references)
    finally:
        gc.enable()


def test_casts_alone_by_init():
    x = random_tensor(2, 2)
    handle = amp.init()
    assert handle.is_active() and handle is amp._amp_state.handle and F.linear(x, x).dtype == torch.float16
    with pytest.raises(NotImplementedError, match=r"binary_cross_entropy on torch\.float16"):
        F.binary_cross_entropy(x.half(), x)
    amp.init(allow_banned=True)
    assert F.binary_cross_entropy(x.half(), x).dtype == torch.float32
    handle._deactivate()
    assert not amp.init(enabled=False).is_active() and F.linear(x, x).dtype == torch.float32
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
    assert amp._amp_state.loss_scalers[0]._unskipped == 0
    assert amp._amp_state.opt_properties.loss_scale == "dynamic"
    assert amp._amp_state.opt_properties.options["cast_model_type"] == (False if level == "O2" else None)


def test_names():
    assert amp.handle is importlib.import_module("easymp.compat.apex.amp.handle")
    assert amp.handle.scale_loss is amp.scale_loss
