"""Images as a data set has them, uint8, to what a model reads: normalised floats in channels-last memory, made on the device.

A uint8 batch is a quarter of an fp32 one, in workers, in pinned memory and on the way to the device; a loader that normalises on the CPU
gives that away.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cuda.casts import normalised
from ..errors import BatchError, SettingError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("NCHW", "NHWC")


class NormalizeImages:
    """``normalize(images)``: (x / 255 - mean) / std, for a batch of uint8 images, wherever it is.

    On an NVIDIA GPU with CuPy it is one kernel, elsewhere torch's operations, with the same bits.

    Args:
        mean, std: one number a channel, of values from 0 to 1 (torchvision's convention).
        dtype: of the result: fp32, bf16 or fp16.
        layout: of the batches: "NCHW", as torchvision decodes images, or "NHWC", as most files have them.

    Raises:
        SettingError: numbers of no use, or another dtype or layout.
    """

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        dtype: torch.dtype = torch.float32,
        layout: str = "NCHW",
    ) -> None:
        if not mean or len(mean) != len(std) or not all(s > 0 for s in std):
            raise SettingError(
                f"mean={mean!r} and std={std!r} must have one number a channel each, and those of std be above 0"
            )
        if dtype not in DTYPES:
            raise SettingError(
                f"dtype={dtype!r} is not one that images are normalised to: torch.float32, bfloat16 or float16"
            )
        if layout not in LAYOUTS:
            raise SettingError(f"layout={layout!r} of images is neither 'NCHW' nor 'NHWC'")
        self.mean, self.std, self.dtype, self.layout = tuple(mean), tuple(std), dtype, layout
        wide = torch.tensor([self.mean, self.std], dtype=torch.float64)
        self._numbers = torch.stack([255 * wide[0], 1 / (255 * wide[1])]).float()
        self._there: dict[torch.device, Tensor] = {}

    def __call__(self, images: Tensor) -> Tensor:
        """(N, C, H, W) in channels-last memory, of `images` as `layout` has them; on their device.

        Raises:
            BatchError: other than four dimensions of uint8, or another number of channels.
        """
        if images.dtype != torch.uint8 or images.ndim != 4:
            raise BatchError(
                f"NormalizeImages takes uint8 images of four dimensions ({self.layout}), not {images.dtype} of shape "
                f"{tuple(images.shape)}: leave ToTensor and Normalize out of the data set, and stack images to batches"
            )
        if self.layout == "NHWC":
            images = images.permute(0, 3, 1, 2)
        if images.shape[1] != len(self.mean):
            raise BatchError(
                f"the images have {images.shape[1]} channels as {self.layout}, and mean has {len(self.mean)} numbers: is the layout right?"
            )
        numbers = self._there.get(images.device)
        if numbers is None:
            numbers = self._there[images.device] = self._numbers.to(images.device)
        return normalised(images, numbers, self.dtype)

    def __repr__(self) -> str:
        return (
            f"NormalizeImages(mean={self.mean}, std={self.std}, dtype={self.dtype}, layout={self.layout!r})"
        )
