"""Micro-batches of at most so many tokens, of samples of different lengths that lie one behind the other in one row.

A round takes consecutive samples of the epoch's order: rank 0's until the next one exceeds its tokens, then rank 1's,
and so on. All that has been read is a prefix of the order, so a position resumes at any number of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.rng import isolated
from ..distributed.process_group import World
from ..errors import BatchError
from .order import Cut, Share

IGNORED = -100  # the label that torch's cross_entropy leaves out


def length_of(sample: Any) -> int:
    """Tokens of a sample: a dict with ``input_ids``, or these by themselves."""
    ids = sample["input_ids"] if isinstance(sample, Mapping) else sample
    if isinstance(ids, (tuple, str, bytes)):
        raise TypeError(f"a {type(ids).__name__} is no list of token ids")
    return len(ids)


def measure(dataset: Any, length: Callable[[Any], int] | Sequence[int] | None, world: World) -> Sequence[int]:
    """The lengths of all samples in tokens. Each rank reads its share of the data set once, unless they are given."""
    if length is not None and not callable(length):
        if isinstance(length, str) or not all(isinstance(number, int) for number in length[:1]):
            raise BatchError(f"length={length!r:.60} is neither a function nor a list of numbers of tokens")
        if len(length) != len(dataset):
            raise BatchError(
                f"length= holds {len(length)} lengths, and the data set has {len(dataset)} samples: pass one a sample"
            )
        return length
    measure_sample = length or length_of
    with isolated():  # data sets may draw random numbers
        try:
            own = [int(measure_sample(dataset[i])) for i in range(world.rank, len(dataset), world.size)]
            error_text = ""
        except Exception as error:  # the other ranks wait to hear of it
            own, error_text = [], f"{type(error).__name__}: {error}"
    shares = world.gather_objects((own, error_text))
    if error_text := next((text for _, text in shares if text), ""):
        raise BatchError(
            f"tokens= packs samples by their lengths, and one cannot be measured ({error_text}): pass "
            "DataLoaderConfiguration(length=...), a function from a sample to its tokens, or the list of all lengths"
        )
    lengths = [0] * len(dataset)
    for rank, (rank_lengths, _) in enumerate(shares):
        lengths[rank :: world.size] = rank_lengths
    return lengths


class TokenBudget(NamedTuple):
    """Cuts the order of an epoch into rounds.

    Attributes:
        tokens: at most so many a rank and round.
        lengths: tokens of each sample, by its index.
    """

    tokens: int
    lengths: Sequence[int]

    def check(self) -> None:
        """Raise BatchError for a sample that fits into no micro-batch, or has no token."""
        if (empty := next((i for i, length in enumerate(self.lengths) if length < 1), None)) is not None:
            raise BatchError(f"sample {empty} has no tokens: leave it out of the data set")
        longest = max(range(len(self.lengths)), key=self.lengths.__getitem__)
        if self.lengths[longest] > self.tokens:
            raise BatchError(
                f"sample {longest} has {self.lengths[longest]:,} tokens, and a micro-batch has at most {self.tokens:,} "
                "(tokens=): cut such samples, leave them out of the data set, or raise tokens"
            )

    def shares(self, order: Sequence[int], cut: Cut, ranks: Collection[int], start: int = 0) -> Iterator[Share]:
        """The micro-batches of `ranks`, from sample `start` of the order on."""
        n, end = len(order), min(start, len(order))
        while end < n:
            packs: list[list[int]] = []
            for _ in range(cut.ranks):
                pack, room = [], self.tokens
                while end < n and self.lengths[order[end]] <= room:
                    room -= self.lengths[order[end]]
                    pack.append(order[end])
                    end += 1
                packs.append(pack)
            surplus = 0
            if end == n and not packs[-1]:
                if cut.drop_last:
                    return
                packs, surplus = self._last(packs, order, cut)
            yield from (Share(rank, pack, end, surplus) for rank, pack in enumerate(packs) if rank in ranks)

    def _last(self, packs: list[list[int]], order: Sequence[int], cut: Cut) -> tuple[list[list[int]], int]:
        """The last round, in which every rank gets a sample: of long packs, or of the epoch's beginning again."""
        packs = [pack for pack in packs if pack]
        while len(packs) < cut.ranks and (longest := max(packs, key=len))[1:]:
            half = len(longest) // 2
            at = packs.index(longest)
            packs[at : at + 1] = [longest[:half], longest[half:]]
        surplus = cut.ranks - len(packs) if cut.completes else 0
        packs += [[order[i % len(order)]] for i in range(surplus)]
        return packs, surplus

    def batches(self, order: Sequence[int], cut: Cut) -> list[int]:
        """Micro-batches of each rank in an epoch."""
        ranks = range(cut.ranks)
        counts = Counter(share.rank for share in self.shares(order, cut, ranks))
        return [counts[rank] for rank in ranks]


def pack(samples: Sequence[Any]) -> dict[str, Any]:
    """Lay samples one behind the other: in place of torch's own collate function, which takes one length only.

    Args:
        samples: of n documents and T tokens together: dicts with ``input_ids`` and other fields of the same length, or
            the ids by themselves. ``labels`` default to the ids; a document's first token is no label, since the token
            before it is another document's.

    Returns:
        ``input_ids``, ``labels``, ``position_ids``, ``document_ids``, all int64 [1, T]; other fields keep their type;
        ``cu_seqlens``, int32 [n + 1], where documents begin, and T; ``max_seqlen``; ``num_items``, the number of labels
        that are not -100.

    Raises:
        BatchError: padding inside a sample, or a field of another length.
    """
    documents = [dict(sample) if isinstance(sample, Mapping) else {"input_ids": sample} for sample in samples]
    for document in documents:
        if not torch.as_tensor(document.pop("attention_mask", 1)).all():
            raise BatchError(
                "a sample has padding (zeros in attention_mask), and tokens= packs samples without: cut it"
            )
        document.setdefault("labels", document["input_ids"])
    lengths = torch.tensor([len(document["input_ids"]) for document in documents])
    starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    batch: dict[str, Any] = {}
    for name in documents[0]:
        batch[name] = torch.cat([field_of(document, name) for document in documents])[None]
    # Types of unsigned integers have no -100.
    batch["input_ids"], batch["labels"] = batch["input_ids"].long(), batch["labels"].to(torch.int64, copy=True)
    batch["labels"][0, starts[:-1]] = IGNORED
    document_ids = torch.repeat_interleave(torch.arange(len(documents)), lengths)
    batch["position_ids"] = (torch.arange(len(document_ids)) - starts[document_ids])[None]
    batch["document_ids"] = document_ids[None]
    batch["cu_seqlens"] = starts.to(torch.int32)
    batch["max_seqlen"] = int(lengths.max())
    batch["num_items"] = int((batch["labels"] != IGNORED).sum())
    return batch


def field_of(document: Mapping[str, Any], name: str) -> Tensor:
    """A field of a document as a tensor of the document's length; BatchError for others."""
    try:
        field = torch.as_tensor(document[name])
        reason = f"of shape {tuple(field.shape)} is not as long as its sample's input_ids"
        if field.ndim and len(field) == len(document["input_ids"]):
            return field
    except KeyError:
        reason = "is missing in a sample"
    except (TypeError, ValueError, RuntimeError) as error:
        reason = f"is no tensor ({error})"
    raise BatchError(
        f"{name!r} {reason}, so it cannot be packed: leave it out of the data set, or pass a collate_fn of your own to "
        "the DataLoader"
    )


def items_of(batch: Any, tokens: int) -> int | Tensor | None:
    """``num_items`` of a batch that is a dict and has it. BatchError where documents have grown since `measure`."""
    if not isinstance(batch, Mapping):
        return None
    if "cu_seqlens" in batch and batch["input_ids"].numel() > tokens:
        raise BatchError(
            f"a micro-batch has {batch['input_ids'].numel():,} tokens, and at most {tokens:,} were to be (tokens=): "
            "length= says less than samples have, or the data set draws their lengths. Draw them in the collate_fn"
        )
    return batch.get("num_items")
