"""Lists of hosts as Slurm shortens them."""

from __future__ import annotations

import pytest

from easymp.distributed.ranks import hosts
from easymp.errors import WorldError


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n5", "n5"),
        ("n[5-9,12]", "n5 n6 n7 n8 n9 n12"),
        ("n[007-010]", "n007 n008 n009 n010"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[3]", "n3"),
        ("b,a", "b a"),
        ("login,n[1-2],gpu-[08,10].local", "login n1 n2 gpu-08.local gpu-10.local"),
        ("rack[1-2]-n[01-02]", "rack1-n01 rack1-n02 rack2-n01 rack2-n02"),
        ("r[1-2][5,7]x,c", "r15x r17x r25x r27x c"),
        ("[10-11]", "10 11"),
        ("10.0.0.[1-2]", "10.0.0.1 10.0.0.2"),
        ("n[1-2,4-5],n7", "n1 n2 n4 n5 n7"),
    ],
)
def test_hosts(text, names):
    assert hosts(text) == names.split()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "separated by commas"),
        ("n[1-2", "brackets that are closed"),
        ("n1]", "brackets that are closed"),
        ("n[1-[2-3]]", "brackets that are closed"),
        ("a,,b", "separated by commas"),
        ("a b", "separated by commas"),
        ("n[]", r"\[\] should hold numbers"),
        ("n[a-b]", r"\[a-b\] should hold numbers"),
        ("n[1-2-3]", r"\[1-2-3\] should hold numbers"),
        ("n[1,]", r"\[1,\] should hold numbers"),
        ("n[9-5]", "9-5 counts down"),
    ],
)
def test_what_is_no_list_is_quoted_with_the_reason(text, words):
    with pytest.raises(WorldError, match=words) as caught:
        hosts(text)
    assert repr(text) in str(caught.value)
