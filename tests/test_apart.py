"""Libraries that draw in the training's process draw from a stream of their own."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from easymp.base.isolation import keep_apart

SOURCE = """
import random
import random as dice
from random import uniform

class Wait:
    def __init__(self, draw=random.random, *, longest=1):
        self.draw, self.longest = draw, longest

    def seconds(self):
        return self.draw() * self.longest

def jitter(draw=random.gauss):
    return draw(0, 1)

def pause():
    return random.random() + dice.randint(1, 5) + uniform(0, 1) + Wait().seconds() + jitter() + random.SystemRandom().random()
"""


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    module = ModuleType("some_client.retries")
    exec(SOURCE, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before = random.getstate()
    yield module
    random.setstate(before)


def test_what_a_library_draws_leaves_the_stream_of_python_where_it_is(client: ModuleType) -> None:
    before = random.getstate()
    client.pause()
    assert random.getstate() != before, "the library of this test draws"
    keep_apart(["some_client"])
    before = random.getstate()
    assert 1 < client.pause() != client.pause() > 1
    assert random.getstate() == before
    random.seed(3)
    first = client.pause()
    random.seed(3)
    assert client.pause() != first, "nor does its seed decide what they draw"


def test_only_the_packages_that_are_named_are_changed(client: ModuleType) -> None:
    keep_apart(["some", "some_client_of_another", "retries"])
    assert client.random is random and sys.modules[__name__].random is random
    random.seed(3)
    first = client.dice.random()
    random.seed(3)
    assert client.dice.random() == first


def test_twice_is_as_once(client: ModuleType) -> None:
    keep_apart(["some_client"])
    own = client.random
    keep_apart(["some_client"])
    assert client.random is own is client.dice and own is not random
