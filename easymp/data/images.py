"""Image normalisation on the device: uint8 batches become floats in channels-last memory.

A uint8 batch takes a quarter of the memory of an fp32 one, in workers, in pinned memory and on the way to the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import BatchError, SettingError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("NCHW", "NHWC")


class NormalizeImages:
    """``normalize(images)`` computes (x / 255 - mean) / std for a batch of uint8 images on its device.

    Args:
        mean: one number per channel for values from 0 to 1, as in torchvision.
        std: likewise.
        dtype: of the result: fp32, bf16 or fp16.
        layout: of the batches: "NCHW", as torchvision decodes images, or "NHWC", as most files store them.

    Raises:
        SettingError: `mean` and `std` do not match, or another dtype or layout.

    Example:
        >>> normalize = NormalizeImages(mean=[0.5], std=[0.5])
        >>> normalize(torch.full((1, 1, 1, 2), 255, dtype=torch.uint8))
        tensor([[[[1., 1.]]]])
    """

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        dtype: torch.dtype = torch.float32,
        layout: str = "NCHW",
    ) -> None:
        if not mean or len(mean) != len(std) or not all(s > 0 for s in std):
            right = "must have one number per channel, and those of std must be above 0"
            raise SettingError(f"mean={mean!r} and std={std!r} {right}")
        if dtype not in DTYPES or layout not in LAYOUTS:
            right = "pass torch.float32, torch.bfloat16 or torch.float16, and 'NCHW' or 'NHWC'"
            raise SettingError(f"dtype={dtype!r} and layout={layout!r}: {right}")
        self.mean, self.std, self.dtype, self.layout = tuple(mean), tuple(std), dtype, layout
        wide = torch.tensor([self.mean, self.std], dtype=torch.float64)
        self._numbers = torch.stack([255 * wide[0], 1 / (255 * wide[1])]).float()
        self._there: dict[torch.device, Tensor] = {}

    def __call__(self, images: Tensor) -> Tensor:
        """Normalise `images`, uint8 of shape (N, C, H, W) or (N, H, W, C) by `layout`, to (N, C, H, W) in channels-last memory.

        Raises:
            BatchError: `images` is not uint8 with four dimensions, or has another number of channels.
        """
        if images.dtype != torch.uint8 or images.ndim != 4:
            got = f"uint8 images of four dimensions ({self.layout}), not {images.dtype} of shape {tuple(images.shape)}"
            raise BatchError(
                f"NormalizeImages takes {got}: leave ToTensor and Normalize out, and stack images to batches"
            )
        if self.layout == "NHWC":
            images = images.permute(0, 3, 1, 2)
        if images.shape[1] != len(self.mean):
            what = f"{images.shape[1]} channels as {self.layout}, and mean has {len(self.mean)} numbers"
            raise BatchError(f"the images have {what}: is the layout right?")
        numbers = self._there.get(images.device)
        if numbers is None:
            numbers = self._there[images.device] = self._numbers.to(images.device)
        shift, times = numbers.view(2, 1, -1, 1, 1)
        wide = images.to(torch.float32, memory_format=torch.channels_last)
        return wide.sub_(shift).mul_(times).to(self.dtype)

    def __repr__(self) -> str:
        how = f"mean={self.mean}, std={self.std}, dtype={self.dtype}, layout={self.layout!r}"
        return f"NormalizeImages({how})"
