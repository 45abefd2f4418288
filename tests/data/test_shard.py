"""Index arithmetic against a model that builds each round by hand."""

from __future__ import annotations

from itertools import cycle, islice

from hypothesis import given
from hypothesis import strategies as st

from easymp.data.order import Cut, Share, halves, parts, rounds, shares

cuts = st.builds(
    Cut, batch=st.integers(1, 5), ranks=st.integers(1, 5), even=st.booleans(), drop_last=st.booleans()
)
lengths = st.integers(0, 60)


def model(order: list[int], cut: Cut, start: int) -> list[tuple[list[list[int]], int, int]]:
    """Rounds from `start` on: each rank's batch (maybe empty), end position, repeats."""
    left, found, position = order[start:], [], start
    while left:
        taken, left = left[: cut.whole], left[cut.whole :]
        position += len(taken)
        surplus = 0
        if len(taken) < cut.whole:
            if cut.drop_last:
                break
            if cut.even and cut.ranks > 1:
                surplus = cut.whole - len(taken)
                taken = taken + list(islice(cycle(order), surplus))
        found.append(
            ([taken[r * cut.batch : (r + 1) * cut.batch] for r in range(cut.ranks)], position, surplus)
        )
    return found


@given(n=lengths, cut=cuts, data=st.data())
def test_shares_are_the_models(n: int, cut: Cut, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(n)))
    start = data.draw(st.integers(0, n))
    expected = model(order, cut, start)
    for rank in range(cut.ranks):
        mine = [
            Share(rank, batches[rank], end, surplus) for batches, end, surplus in expected if batches[rank]
        ]
        assert list(shares(order, cut, rank, start)) == mine
        assert cut.batches(n - start, rank) == len(mine)
        # A stream of unknown length, and a sequence that is sliced, are cut alike.
        streamed = rounds(
            iter(order), cut.whole, complete=cut.even and cut.ranks > 1, drop_last=cut.drop_last, start=start
        )
        assert [share for r in streamed for share in parts(r, cut.batch, [rank])] == mine
    assert cut.surplus(n - start) == (expected[-1][2] if expected else 0)


@given(
    sizes=st.lists(st.integers(1, 5), max_size=12),
    ranks=st.integers(1, 4),
    complete=st.booleans(),
    data=st.data(),
)
def test_whole_batches_are_dealt_in_turn(sizes, ranks, complete, data):
    batches = [[(b, i) for i in range(size)] for b, size in enumerate(sizes)]
    begin = data.draw(st.integers(0, len(batches)))
    start = sum(sizes[:begin])
    dealt = list(rounds(batches, ranks, complete=complete, start=start, weigh=len))
    flat = [batch for round_ in dealt for batch in round_.items]
    assert flat[: len(batches) - begin] == batches[begin:]
    assert flat[len(batches) - begin :] == [
        batches[i % len(batches)] for i in range(len(flat) - len(batches) + begin)
    ]
    if dealt:
        assert dealt[-1].end == sum(sizes)
        assert dealt[-1].surplus == sum(map(len, flat[len(batches) - begin :]))
        assert not complete or all(len(round_.items) == ranks for round_ in dealt)


@given(
    sizes=st.lists(st.integers(1, 9), max_size=8), ranks=st.integers(1, 5), even=st.booleans(), data=st.data()
)
def test_split_batches_keep_every_sample(sizes, ranks, even, data):
    batches = [[(b, i) for i in range(size)] for b, size in enumerate(sizes)]
    begin = data.draw(st.integers(0, len(batches)))
    read = list(halves(batches, ranks, even=even, start=sum(sizes[:begin])))
    assert [r.items[: len(r.items) - r.surplus] for r, _ in read] == batches[begin:]
    for round_, part in read:
        dealt = list(parts(round_, part, range(ranks)))
        assert [i for share in dealt for i in share.items] == round_.items
        assert not even or ({len(share.items) for share in dealt} == {part} and len(dealt) == ranks)
