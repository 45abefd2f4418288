"""uint8 batches become what a data set that normalises would have given."""

import pytest
import torch

from easymp import BatchError, NormalizeImages, SettingError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_both_layouts_give_the_formula_in_channels_last(layout, dtype):
    images = torch.randint(0, 256, (2, 3, 8, 6), dtype=torch.uint8)
    given = images if layout == "NCHW" else images.permute(0, 2, 3, 1).contiguous()
    normalize = NormalizeImages(MEAN, STD, dtype, layout)
    exact = (images.double() / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    for _ in range(2):
        found, rtol = normalize(given), 1e-5 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(found.double(), exact, rtol=rtol, atol=1e-6)
        assert found.dtype == dtype and found.is_contiguous(memory_format=torch.channels_last)


def test_other_batches_and_settings_are_refused():
    byte = torch.zeros(2, 4, 4, 3, dtype=torch.uint8)
    for images, words in ((byte.float(), "uint8"), (byte[0], "four dimensions"), (byte, "layout")):
        with pytest.raises(BatchError, match=words):
            NormalizeImages(MEAN, STD)(images)
    wrong = [
        {"std": (0.1, 0.2)},
        {"std": (0.1, 0.2, 0.0)},
        {"mean": ()},
        {"dtype": torch.float64},
        {"layout": "HWC"},
    ]
    for words in wrong:
        with pytest.raises(SettingError):
            NormalizeImages(**{"mean": MEAN, "std": STD, **words})
