"""Stochastic rounding.

Torch's operations and the kernels cut the same numbers at the same places, on the average nowhere.
"""

import pytest
import torch

from easymp.cuda.kernel import Role, Row, key_of, lay_out, stochastic, stream

from .compiled import CompiledLauncher

INF = float("inf")
EDGES = [0.0, -0.0, 1.0, -1.0, 1e-40, -3e-39, 3.3e38, 3.4028235e38, -3.4028235e38]
EDGES += [INF, -INF, float("nan"), 0.1, 1 / 3]


def by_kernel(x, seed, step, number, role, offset):
    setup = f"const u32 key = key_of((u64)seed, (u32){step}, (u32)row[3]); const i64 origin = (i64)row[4];"
    kernel = stream(
        "round",
        [Role("x"), Role("y", reads=False, writes=True)],
        {"x": torch.float32, "y": torch.bfloat16},
        f"y = rounded(x, key, {role}u, origin + e);",
        arguments=("int64 seed",),
        setup=setup,
    )
    y = torch.empty_like(x, dtype=torch.bfloat16)
    laid = lay_out([[Row((x, y), 1, number, offset)]], torch.device("cpu"))
    CompiledLauncher().launch(kernel, laid.starts[-1], [laid.rows.data_ptr(), laid.chunks.data_ptr(), 0, seed])
    return y


def bits(tensor):
    return tensor.view(torch.int16)


@pytest.mark.parametrize(
    ("seed", "step", "number", "role", "offset"),
    [(0, 1, 0, 0, 0), (2**63 - 1, 2**24, 300, 2, 5), (7, 3, 1, 1, 2**32 - 9), (7, 3, 1, 1, 3 * 2**40 + 1)],
)
def test_torch_and_the_kernel_round_alike(seed, step, number, role, offset):
    x = torch.cat([torch.tensor(EDGES), torch.randn(40_000) * torch.logspace(-38, 38, 40_000)])
    from_kernel = by_kernel(x, seed, step, number, role, offset)
    by_torch = stochastic(x, key_of(seed, step, number), role, offset)
    assert torch.equal(bits(by_torch), bits(from_kernel))
    assert torch.equal(
        bits(stochastic(x, key_of(seed, torch.tensor(float(step)), number), role, offset)), bits(by_torch)
    )


@pytest.mark.parametrize("sample", ["elements", "steps", "parameters"])
def test_the_mean_of_many_roundings_is_the_number(sample):
    values = torch.tensor([1.0 + 2**-9, -(1.0 + 2**-10), 3.14159, 1e-3 * 1.2345, -7.77e-20])
    if sample == "elements":
        rounded = stochastic(values.repeat(20_000), key_of(3, 5, 7)).double().view(-1, 5)
    else:
        keys = [key_of(3, *((i, 7) if sample == "steps" else (5, i))) for i in range(1, 1001)]
        rounded = torch.stack([stochastic(values, key) for key in keys]).double()
    exact, low, high = values.double(), rounded.amin(0), rounded.amax(0)
    share = (exact - low) / (high - low)
    error = (share * (1 - share) / len(rounded)).sqrt() * (high - low)
    assert (high - low <= abs(exact) * 2**-7).all()
    assert (abs(rounded.mean(0) - exact) < 5 * error).all()


def test_bits_of_neighbours_steps_parameters_roles_and_shards_have_nothing_in_common():
    def coins(seed=3, step=5, number=7, role=0, offset=0):
        rounded = stochastic(torch.full((20_000,), 1 + 2**-8), key_of(seed, step, number), role, offset)
        return (rounded.double() > 1).double() * 2 - 1  # half-way: each bit a fair coin

    base = coins()
    neighbours = [coins(step=6), coins(number=8), coins(seed=4), coins(role=1), coins(offset=20_000)]
    for fair in (base, *(neighbour * base for neighbour in neighbours), *neighbours, base[1:] * base[:-1]):
        assert abs(fair.mean()) < 5 / 20_000**0.5


def test_rows_of_a_whole_are_rounded_alike_however_it_is_cut():
    x, key = torch.randn(100, 33), key_of(1, 2, 3)
    for cut in (1, 37, 99):
        assert torch.equal(stochastic(x[cut:], key, offset=cut * 33), stochastic(x, key)[cut:])
