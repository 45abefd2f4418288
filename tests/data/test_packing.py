"""Loaders with ``tokens=``: which documents go together, and training by them."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Sampler

from easymp import Accelerator, BatchError, DataLoaderConfiguration, RefusedError, StepError

from .loaders import Stream, prepared

VOCABULARY, WIDTH, TOKENS = 128, 16, 160


def documents() -> list[dict[str, Any]]:
    """Paragraphs of the standard library's text as ASCII codes, with the number of the document at each token."""
    paragraphs = Path(textwrap.__file__).read_text(encoding="utf-8").split("\n\n")
    codes = [[min(ord(letter), VOCABULARY - 1) for letter in text[:TOKENS]] for text in paragraphs if len(text) > 1]
    return [{"input_ids": ids, "document": [i] * len(ids)} for i, ids in enumerate(codes)]


class Attention(nn.Module):
    """One layer of attention inside each document, and a prediction of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, position_ids: Tensor, document_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.positions(position_ids)
        same_document = document_ids[:, :, None] == document_ids[:, None]
        mask = same_document & torch.ones_like(same_document).tril()
        query, key, value = self.qkv(x).chunk(3, -1)
        return self.head(x + F.scaled_dot_product_attention(query, key, value, attn_mask=mask))


def outputs(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["input_ids"], batch["position_ids"], batch["document_ids"])


def next_token_loss(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction=reduction)


def read(data: list[list[int]], rank: int, ranks: int, state: Any = None, shuffle: bool = True) -> list[list[int]]:
    """The documents of each batch of a pass on a rank, which begins at a state."""
    loader = prepared(DataLoader(data, shuffle=shuffle), rank, ranks, tokens=TOKENS)
    if state is not None:
        loader.load_state_dict(state)
    length, batches = len(loader), []
    for batch in loader:
        assert batch["input_ids"].numel() <= TOKENS
        documents = [ids[0].item() for ids in batch["input_ids"][0].split(batch["cu_seqlens"].diff().tolist())]
        batches.append(documents[: len(documents) - (rank >= ranks - loader.surplus)])
    if state is None:
        assert length == len(batches)
    return batches


LENGTHS = st.lists(st.integers(1, TOKENS), min_size=1, max_size=60)


@given(lengths=LENGTHS, ranks=st.integers(1, 4), shuffle=st.booleans())
@settings(max_examples=50, deadline=None)
def test_ranks_read_each_document_once_in_equal_numbers_of_batches(
    lengths: list[int], ranks: int, shuffle: bool
) -> None:
    data = [[i] * length for i, length in enumerate(lengths)]
    shares = [read(data, rank, ranks, shuffle=shuffle) for rank in range(ranks)]
    assert len({len(batches) for batches in shares}) == 1
    assert sorted(i for batches in shares for batch in batches for i in batch) == list(range(len(data)))


@given(lengths=LENGTHS, ranks=st.integers(1, 4), later_ranks=st.integers(1, 4), stop=st.integers(0, 8))
@settings(max_examples=50, deadline=None)
def test_a_pass_is_resumed_at_any_number_of_ranks(lengths: list[int], ranks: int, later_ranks: int, stop: int) -> None:
    data = [[i] * length for i, length in enumerate(lengths)]
    loader = prepared(DataLoader(data, shuffle=True), 0, ranks, tokens=TOKENS)
    for number, _ in enumerate(loader):
        if number == stop:
            state = loader.state_dict()
            break
    else:
        return
    before = [read(data, rank, ranks)[: stop + 1] for rank in range(ranks)]
    after = [read(data, rank, later_ranks, state) for rank in range(later_ranks)]
    assert sorted(i for batches in before + after for batch in batches for i in batch) == list(range(len(data)))


def test_a_batch_says_where_its_documents_lie() -> None:
    data = [{"input_ids": [5, 6, 7], "weight": [0.0, 0.5, 1.0]}, {"input_ids": [8, 9], "weight": [2.0, 3.0]}]
    (batch,) = prepared(DataLoader(data), tokens=8)
    plain = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in batch.items()}
    assert plain == {
        "input_ids": [[5, 6, 7, 8, 9]],
        "weight": [[0.0, 0.5, 1.0, 2.0, 3.0]],
        "labels": [[-100, 6, 7, -100, 9]],
        "position_ids": [[0, 1, 2, 0, 1]],
        "document_ids": [[0, 0, 0, 1, 1]],
        "cu_seqlens": [0, 3, 5],
        "max_seqlen": 3,
        "num_items": 3,
    }
    assert batch["cu_seqlens"].dtype == torch.int32


def test_lengths_by_a_function_or_a_list_and_batches_by_the_scripts_own_function() -> None:
    data = [[i] * length for i, length in enumerate((3, 2, 4))]
    for length in (lambda sample: 2 * len(sample), [6, 4, 8]):
        loader = prepared(DataLoader(data, collate_fn=list), tokens=10, length=length)
        assert list(loader) == [data[:2], data[2:]]


def test_other_documents_change_no_logit() -> None:
    torch.manual_seed(0)
    model, data = Attention(), documents()
    (batch, *_) = prepared(DataLoader(data), tokens=3 * TOKENS)
    first, second = batch["cu_seqlens"][1:3].tolist()
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][0, first:second] = 1
    logits, changed_logits = outputs(model, batch)[0], outputs(model, changed)[0]
    assert not torch.equal(logits[first:second], changed_logits[first:second])
    assert torch.equal(logits[:first], changed_logits[:first]) and torch.equal(logits[second:], changed_logits[second:])


def train(strategy: str, folder: str, accumulation: int) -> tuple[list[list[int]], dict[str, Tensor]]:
    """The documents of each update on this rank, and the trained weights, by a loss that is a mean."""
    torch.manual_seed(0)
    model = Attention()
    acc = Accelerator(
        cpu=True,
        strategy=strategy,
        mixed_precision="fp32",
        gradient_accumulation_steps=accumulation,
        dataloader_config=DataLoaderConfiguration(tokens=3 * TOKENS),
        project_dir=folder,
        log_with="none",
        seed=0,
    )
    with acc:
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer, loader = acc.prepare(model, optimizer, DataLoader(documents(), shuffle=True))
        updates: list[list[int]] = [[]]
        for batch in loader:
            updates[-1] += batch["document"][0].unique().tolist()
            with acc.accumulate(model):
                acc.backward(next_token_loss(outputs(model, batch), batch["labels"]))
                optimizer.step()
                optimizer.zero_grad()
            if acc.sync_gradients:
                updates.append([])
        assert optimizer.updates == len(updates) - 1 == acc.total_updates(loader)
        return updates, dict(acc.weights(model))


def plain_loop(updates: list[list[int]]) -> dict[str, Tensor]:
    """The weights after updates by these documents, one document at a time and nothing packed."""
    torch.manual_seed(0)
    model, data = Attention(), documents()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for update in filter(None, updates):
        losses, count = [], 0
        for i in update:
            ids = torch.tensor([data[i]["input_ids"]])
            logits = model(ids, torch.arange(ids.shape[1])[None], torch.zeros_like(ids))
            losses.append(next_token_loss(logits, ids, "sum"))
            count += ids.shape[1] - 1
        optimizer.zero_grad()
        (sum(losses) / count).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("strategy", ["single", "ddp", "zero1", "fsdp"])
def test_a_mean_loss_trains_as_the_plain_loop_over_single_documents(
    strategy: str, accumulation: int, ranks: Any, tmp_path: Path
) -> None:
    if strategy == "single":
        results = [train(strategy, str(tmp_path), accumulation)]
    else:
        results = ranks(train, strategy, str(tmp_path), accumulation)
    updates = [list(chain(*of_ranks)) for of_ranks in zip(*(updates for updates, _ in results))]
    assert sorted(chain(*updates)) == list(range(len(documents())))
    assert len(updates) > 3
    trained, expected = results[0][1], plain_loop(updates)
    for name, value in expected.items():
        torch.testing.assert_close(trained[name], value, atol=2e-6, rtol=1e-5)


@pytest.mark.on_ranks(2)
def test_pipeline_is_refused() -> None:
    with pytest.raises(RefusedError, match="a packed batch is one row"):
        Accelerator(cpu=True, strategy="pipeline", dataloader_config=DataLoaderConfiguration(tokens=8))


def test_several_open_loaders_and_a_mean_are_refused() -> None:
    acc = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(tokens=8), log_with="none")
    model, loader, other = acc.prepare(nn.Linear(1, 1), DataLoader([[1, 2, 3]] * 4), DataLoader([[1, 2]] * 4))
    batches = zip(loader, other)
    with acc:
        batch, _ = next(batches)
        loss = model(batch["input_ids"].float().mean(1, keepdim=True)).mean()
        with pytest.raises(StepError, match="num_items"):
            acc.backward(loss)


def train_on_ones(loader_options: dict[str, Any], lengths: Sequence[int], accumulation: int = 1) -> Iterator[Any]:
    """An Accelerator, its model of one weight, and the packed batches."""
    config = DataLoaderConfiguration(tokens=8)
    acc = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, dataloader_config=config, log_with="none")
    with acc:
        data = [[1] * length for length in lengths]
        model, loader = acc.prepare(nn.Linear(1, 1), DataLoader(data, **loader_options))
        for batch in loader:
            yield acc, model, batch


def mean_of(model: Any, batch: Any) -> Tensor:
    return model(batch["input_ids"].float().mean(1, keepdim=True)).mean()


def test_a_mean_after_several_batches_is_refused() -> None:
    batches = train_on_ones({}, [8, 8])
    (acc, model, batch), _ = next(batches), next(batches)
    with pytest.raises(StepError, match="after 2 batches of a loader that packs by tokens="):
        acc.backward(mean_of(model, batch))
    batches.close()


def test_items_outside_of_accumulate_are_refused() -> None:
    batches = train_on_ones({}, [8, 8], accumulation=2)
    acc, model, batch = next(batches)
    with pytest.raises(StepError, match="number of items outside of `with"):
        acc.backward(mean_of(model, batch))
    batches.close()


class Epochs(Sampler[int]):
    """Orders by epochs, with a generator of its own."""

    epoch = 0

    def __init__(self) -> None:
        self.random = random.Random(0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = list(range(12))
        random.Random(self.epoch).shuffle(order)
        self.random.random()
        return iter(order)

    def __len__(self) -> int:
        return 12


def test_counting_batches_draws_no_order_twice_and_counts_each_epoch_of_a_sampler() -> None:
    data, sampler = [[1] * length for length in (1, 7, 5, 3, 8, 2, 6, 4, 5, 1, 7, 3)], Epochs()
    loader = prepared(DataLoader(data, sampler=sampler), tokens=8)
    lengths = loader.lengths(4)
    assert sampler.epoch == 0 and len(set(lengths)) > 1
    assert [len(list(loader)) for _ in range(4)] == lengths
    draws = sampler.random.getstate()
    number = len(loader)
    assert sampler.random.getstate() != draws and len(list(loader)) == number


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_labels_of_every_integer_type_leave_out_first_tokens(dtype: torch.dtype) -> None:
    (batch,) = prepared(DataLoader([torch.tensor([1, 2, 3], dtype=dtype)]), tokens=8)
    assert batch["labels"].tolist() == [[-100, 2, 3]] and batch["input_ids"].dtype == torch.int64


def test_documents_that_have_grown_are_refused() -> None:
    with pytest.raises(BatchError, match="a micro-batch has 14 tokens, and at most 8"):
        list(prepared(DataLoader([[1] * 7] * 2), tokens=8, length=[4, 4]))


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (lambda: DataLoader([[1] * 5, [1] * 12]), {}, "sample 1 has 12 tokens, and a micro-batch has at most 8"),
    (lambda: DataLoader([[1], []]), {}, "sample 1 has no tokens"),
    (lambda: DataLoader([1, 2]), {}, "one cannot be measured .TypeError"),
    (lambda: DataLoader([([1, 2], 0)]), {}, "a tuple is no list of token ids"),
    (lambda: DataLoader([[1], [2]]), {"length": "ab"}, "neither a function nor a list"),
    (lambda: DataLoader([[1], [2]]), {"length": [1]}, "holds 1 lengths, and the data set has 2 samples"),
    (lambda: DataLoader([[1], [2]], batch_size=2), {}, "leave batch_size and batch_sampler out"),
    (lambda: DataLoader([[1], [2]]), {"split_batches": True}, "split_batches out"),
    (lambda: DataLoader([[1], [2]]), {"use_seedable_sampler": False}, "leave use_seedable_sampler=False out"),
    (lambda: DataLoader(Stream(4)), {}, "pass a map-style data set"),
]


@pytest.mark.parametrize(("loader", "config", "sentence"), WRONG)
def test_what_cannot_be_packed_is_refused(loader: Any, config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BatchError, match=sentence):
        prepared(loader(), tokens=8, **config)


@pytest.mark.parametrize(
    ("sample", "sentence"),
    [
        ({"input_ids": [1, 2], "attention_mask": [1, 0]}, "has padding"),
        ({"input_ids": [1, 2], "text": "ab"}, "'text' is no tensor"),
        ({"input_ids": [1, 2], "score": 0.5}, "'score' of shape .. is not as long as its sample's input_ids"),
    ],
)
def test_samples_that_are_no_documents_are_refused(sample: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BatchError, match=sentence):
        list(prepared(DataLoader([sample]), tokens=8))
