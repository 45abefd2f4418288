"""Images are normalised to the same bits by the kernels and by torch."""

import pytest
import torch

from easymp.cuda import casts as module
from easymp.cuda.casts import normalised

from .compiled import CompiledLauncher

MEAN, STD = [0.485, 0.456, 0.406, 0.5], [0.229, 0.224, 0.225, 0.25]


@pytest.fixture
def launcher(monkeypatch):
    made = CompiledLauncher()
    monkeypatch.setattr(module, "launcher_with", lambda device, kernels: made)
    return made


def by_torch(images, numbers, dtype):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "launcher_with", lambda device, kernels: None)
        return normalised(images, numbers, dtype)


def numbers(channels):
    return torch.stack([255 * torch.tensor(MEAN[:channels]), 1 / (255 * torch.tensor(STD[:channels]))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_kernels_and_torch_give_the_same_bits(channels, dtype, launcher):
    for n, h, w in [(2, 8, 8), (3, 5, 7), (1, 1, 1), (2, 64, 64), (0, 4, 4), (5, 1, 16)]:
        planes = torch.randint(0, 256, (n, channels, h, w), dtype=torch.uint8)
        expected = by_torch(planes, numbers(channels), dtype)
        for images in (planes, planes.to(memory_format=torch.channels_last)):
            found = normalised(images, numbers(channels), dtype)
            assert torch.equal(found, expected)
            assert found.is_contiguous(memory_format=torch.channels_last)
            assert found.dtype == dtype
    exact = (planes.double() / 255 - torch.tensor(MEAN[:channels]).view(-1, 1, 1)) / torch.tensor(
        STD[:channels]
    ).view(-1, 1, 1)
    torch.testing.assert_close(expected.double(), exact, rtol=2**-7, atol=1e-6)


def test_all_values_and_views(launcher):
    values = torch.arange(256, dtype=torch.uint8).repeat(3, 1).view(1, 3, 16, 16)
    buffer = torch.empty(769, dtype=torch.uint8)[1:]  # not aligned
    expected = by_torch(values, numbers(3), torch.bfloat16)
    assert torch.equal(
        normalised(buffer.view(1, 3, 16, 16).copy_(values), numbers(3), torch.bfloat16), expected
    )
    last = buffer.view(1, 16, 16, 3).permute(0, 3, 1, 2).copy_(values)
    assert torch.equal(normalised(last, numbers(3), torch.bfloat16), expected)
    assert len(launcher.launches) == 2
    flipped = values.flip(2)[:, :, ::2]  # no run of memory: torch's
    assert torch.equal(normalised(flipped, numbers(3), torch.bfloat16), expected.flip(2)[:, :, ::2])
    assert len(launcher.launches) == 2
