"""An example that needs a newer torch than easymp does says so."""

from __future__ import annotations

import pytest
import torch

from .run import within


def test_char_gpt_says_which_torch_has_its_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(SystemExit, match=r"needs torch 2.9 or newer, for torch.optim.Muon; this is torch "):
        within("examples/char_gpt.py")
