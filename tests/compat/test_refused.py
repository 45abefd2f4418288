"""What easymp/compat/refused.toml names fails where it is imported, and says what to write instead."""

from __future__ import annotations

import importlib
import re

import pytest

from easymp.compat.layer import REFUSED, by_word

# Modules of each layer that refuse other names as the layer itself does. Accelerate and Fabric have tests of their own.
MODULES = {
    "apex": "amp fp16_utils normalization optimizers parallel",
    "deepspeed": "runtime.lr_schedules utils zero",
    "horovod": "functions mpi_ops",
}


@pytest.mark.parametrize("library", MODULES)
def test_what_is_refused_says_what_to_write(library):
    package, table = importlib.import_module(f"easymp.compat.{library}"), REFUSED[library]
    for name, reason in by_word(table["names"]).items():
        with pytest.raises(ImportError, match=re.escape(f".{name} is not part of easymp.compat: {reason}")):
            getattr(package, name)
    for address, reason in by_word(table["modules"]).items():
        with pytest.raises(ImportError, match=re.escape(f".{address} is not part of easymp.compat: {reason}")):
            importlib.import_module(f"{package.__name__}.{address}")
    for address in MODULES[library].split():
        with pytest.raises(ImportError, match=re.escape(f"{address}.nothing is not part of easymp.compat. Here are ")):
            importlib.import_module(f"{package.__name__}.{address}").nothing  # noqa: B018
