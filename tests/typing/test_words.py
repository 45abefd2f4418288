"""Type checkers read literals and no tables: both have the same words."""

from __future__ import annotations

import inspect
from typing import get_args

import pytest

from easymp import Accelerator, DDPCommunicationHookType, SettingError
from easymp.options import CommHook
from easymp.registry import ALIASES, PRECISIONS, STRATEGIES, PrecisionName, StrategyName
from easymp.settings import Compiled
from easymp.strategies import transforms
from easymp.trackers import ALL, NONE, TRACKERS, TrackerName


def test_the_literals_of_settings_are_the_words_that_the_registries_have() -> None:
    assert get_args(StrategyName) == ("auto", *STRATEGIES)
    assert get_args(PrecisionName) == ("auto", *PRECISIONS, *ALIASES)
    assert get_args(TrackerName) == (*TRACKERS, ALL, NONE)
    assert get_args(Compiled) == ("no", *get_args(transforms.Compiled))
    refused = {DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD}
    assert set(get_args(CommHook)) == set(DDPCommunicationHookType) - refused


def test_the_signature_has_no_catch_all() -> None:
    parameters = inspect.signature(Accelerator).parameters.values()
    assert {parameter.kind for parameter in parameters} == {inspect.Parameter.KEYWORD_ONLY}
    with pytest.raises(SettingError, match="did you mean 'mixed_precision'"):
        Accelerator(mixed_precission="bf16")  # type: ignore[call-arg]
