"""The world: this process and the other ranks. Every collective is the identity at size 1.

Joining: a store (torchrun's, else rank 0 opens one), in which every rank signs in, so that a missing rank has a name;
then the process group. Leaving, in the order that never deadlocked: drop the wrappers of models, collect garbage, say
farewell in the store and wait for the others' farewells, destroy.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import importlib
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.distributed import ReduceOp

from ..base import env
from ..base.parts import Parts
from ..base.ranks import LOOPBACK, Ranks
from ..base.rng import TORCH
from ..errors import ALIKE, RefusedError, WorldError, failing
from . import hang_watch
from .hang_watch import HangWatch
from .mailbox import Mailbox, Watch, recorder_entries

# Means are sums, then divided: gloo has no average of integers.
OPS = {"sum": ReduceOp.SUM, "mean": ReduceOp.SUM, "max": ReduceOp.MAX, "min": ReduceOp.MIN, "product": ReduceOp.PRODUCT}
# Types that every backend moves. Others travel as bytes (gather, broadcast) or through int32 (reduce).
MOVABLE = {
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.int8,
}  # fmt: skip
BUCKET = 2**26  # bytes averaged at a time
# Whether a group is bound to its device, so that it connects at once and parts of it (those of a mesh of two
# dimensions) are split from it. Before 2.10 torch splits no group of two backends: 2.8 stops with an assertion, and in
# 2.9 gloo's parts meet under one name.
BINDS = TORCH >= (2, 10)
BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}  # "gloo" elsewhere
FAREWELL = 10.0  # seconds to wait for the others before leaving


class World:
    """This process and its peers.

    Args:
        device: where its tensors are; becomes this process's current one, so that nothing of it ends up on the first.
        timeout: seconds that a collective may wait for the other ranks.
        debug: False leaves out `compare`; with True, zero1 also compares the number of gradients in each step.
        backend: the name that the caller expects; None: any.
    """

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        timeout: float = 120.0,
        debug: bool | None = None,
        backend: str | None = None,
    ) -> None:
        check_backend(backend, device)
        self.ranks = ranks
        self.rank, self.size = ranks.rank, ranks.size
        self.local_rank, self.local_size = ranks.local_rank, ranks.local_size
        self.device = device
        if device.index is not None:
            torch.get_device_module(device).set_device(device)
        self.timeout, self.debug = timeout, debug
        self.backend: str | None = None
        self.parts = Parts()  # of the run
        self.forwards = 0  # of models with a forward that needs every rank
        self.wrappers: weakref.WeakSet[Any] = weakref.WeakSet()  # torch's, which must be gone before the group
        self.owned = False  # whether we started the process group, and so end it
        self.watch: Watch | None = None  # listens for the other ranks; None in a world of one
        self._hang_watch: HangWatch | None = None
        self._process = os.getpid()
        self._has_ended = False
        self._store: dist.Store | None = None
        self._mailbox: Mailbox | None = None  # of the group that runs
        self._group = 0  # number of the group that runs, the same on all ranks
        self._comparisons = self._turns = 0  # calls of `compare` and `in_turn` in this group
        self._barriers = 0
        self._pending_comparison: tuple[int, str, float] | None = None  # number, call and beginning
        self._ending = threading.Lock()
        if not ranks.announced:
            return
        if not dist.is_initialized():
            self._store = (_signed_in.pop() if _signed_in else _sign_in(ranks, timeout)).store
            self._connect(self._store)
            self.owned = True
        self.backend, self._store = dist.get_backend(), self._store or dist.distributed_c10d._get_default_store()
        if self.size > 1:
            self.watch = Watch(self.rank, self.size, self._store, self._abort)
        atexit.register(self.close)  # a thread that sleeps in the store must not outlive the interpreter

    # -- joining and leaving ------------------------------------------------------------------------------------------

    def _connect(self, store: dist.Store) -> None:
        mailbox = Mailbox.open(store, "group", self.rank, self.size)
        self._group = mailbox.number
        self._comparisons = self._turns = 0
        # Its functions have the default group as default arguments: imported later (by the first DDP), it would keep
        # this group's connections open for good, and ranks that wait for this one would not see it leave.
        importlib.import_module("torch.distributed.nn.functional")
        # torch warns that a message shares its stream with the group's collectives. Nothing here minds their order.
        serial = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
        defaults = {"TORCH_FR_BUFFER_SIZE": str(hang_watch.RECORDER_SIZE), serial: "0"}
        limit = timedelta(seconds=self.timeout)
        with env.override(**{name: env.read(name, default) for name, default in defaults.items()}):
            dist.init_process_group(
                BACKENDS.get(self.device.type, "gloo"),
                store=mailbox.store,
                rank=self.rank,
                world_size=self.size,
                timeout=limit,
                device_id=self.device if self.device.type == "cuda" and BINDS else None,
            )
        if not hasattr(dist.ProcessGroupGloo, "set_timeout"):
            # In torch 2.8 a group of gloo gets its timeout when it is made, and never again (`set_group_timeouts`).
            dist.distributed_c10d.default_pg_timeout = limit
        # A rank that fails at once would look like a failed connection to ranks that are not connected yet.
        try:
            mailbox.barrier("connected", self.timeout)
        except (TimeoutError, RuntimeError) as error:
            raise WorldError(
                f"rank {self.rank} of {self.size} is connected, and not all others were within {self.timeout:g} s "
                f"({error}): see their output"
            ) from error
        self._mailbox = mailbox

    def close(self) -> None:
        """Leave the world, and end a process group that was started here. Wrappers of models must be gone."""
        atexit.unregister(self.close)
        if self._process != os.getpid():
            return  # a forked child that ends: the connections are its parent's
        if self._hang_watch is not None:
            self._hang_watch.close()
            self._hang_watch = None
        reachable = self.watch is None or self.watch.reachable()
        if self.watch is not None:
            self.watch.leave(self._group, self._comparisons + 1)
            self.watch.close()
            self.watch = None
        if self.owned and dist.is_initialized():
            if self.wrappers:
                gc.collect()  # DDP holds itself by a cycle, and can deadlock where it outlives its group
            if reachable and self._mailbox is not None:
                # A process that ends by an error does not wait, so that the others see it leave at once.
                patience = 0.0 if failing() else min(self.timeout, FAREWELL)
                with suppress(TimeoutError, RuntimeError):  # some are late, or rank 0 and its store are gone
                    self._mailbox.barrier("farewell", patience)
            dist.destroy_process_group()
            dist.distributed_c10d.default_pg_timeout = dist.constants.default_pg_timeout
            forget_meshes()
            self._has_ended = True
        self.owned = False

    def group(self, ranks: Iterable[int]) -> dist.ProcessGroup:
        """A group of these ranks, with the world's timeout; a collective of all ranks."""
        group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=timedelta(seconds=self.timeout))
        return group

    def set_group_timeouts(self) -> None:
        """Give every group that this rank is in the world's timeout; torch gives those of a mesh 30 minutes."""
        if self.size > 1:
            # Public in torch 2.15, which warns of the name it had before.
            set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
            for group in list(dist.distributed_c10d._world.pg_map):
                set_timeout(timedelta(seconds=self.timeout), group)

    def store(self) -> dist.Store:
        """A connection of its own to the store that all ranks share."""
        assert self._store is not None, "a world of one has no store"
        store: dist.Store = self._store.clone()  # type: ignore[attr-defined]  # torch's stub lacks it
        return store

    def break_off(self) -> None:
        """Cut this rank's connections, so that ranks that wait for it get an error now. `restart` follows."""
        if self.watch is not None:
            self.watch.leave(self._group, self._comparisons + 1)
            if self.device.type != "cpu":  # their kernels wait on the device, which sees no closed socket
                self.watch.abort_others(self._group)
        self._abort(self._group)

    def _abort(self, group: int) -> None:
        """End the group of this number, if it still runs. Called in the listener's thread, too."""
        with self._ending:
            if group != self._group or not dist.is_initialized():
                return
            if self.device.type == "cuda":
                # Destroying it would wait for collectives that others have broken off or never come to.
                dist.distributed_c10d._abort_process_group()
            else:
                dist.destroy_process_group()

    def restart(self) -> None:
        """Begin again over fresh connections, on all ranks together, after one of them broke off."""
        self._abort(self._group)
        forget_meshes()
        assert self._store is not None
        self._connect(self._store)
        if self._hang_watch is not None:
            self._hang_watch.since = time.time()

    def start_hang_watch(self, after: float, folder: str | None) -> None:
        """From now on report a collective that has waited for `after` seconds (0: none do), once in a process."""
        if self.watch is not None and after and all(t.name != hang_watch.THREAD for t in threading.enumerate()):
            local_folder = Path(os.curdir if folder is None or "://" in folder else folder)
            self._hang_watch = HangWatch(self.watch, after, local_folder, lambda: self._pending_comparison)

    # -- calls of a script --------------------------------------------------------------------------------------------

    def has_left(self, rank: int) -> bool:
        """Whether another rank has left the run."""
        return self.watch is None or self.watch.has_left(self._group, rank)

    def position(self) -> dict[str, int]:
        """How many meetings of the ranks this one has begun, by kind and group. All ranks begin them in one order."""
        meetings = {"compare": self._comparisons, "turn": self._turns, "barrier": self._barriers}
        collectives = (entry for entry in recorder_entries() if not entry.get("is_p2p"))
        return meetings | {str(entry["process_group"]): int(entry["collective_seq_id"]) for entry in collectives}

    def note_training_thread(self) -> None:
        """Report the line of this thread as the position of this rank, when the others wait for it."""
        if self.watch is not None:
            self.watch.training_thread = threading.get_ident()

    def compare(
        self, call: str, facts: Callable[[], dict[str, str]] = dict, error: str = "", remedy: str = ALIKE
    ) -> None:
        """Before a collective that a script calls: raise one error on all ranks where their calls differ, by the store.

        Args:
            call: name and arguments.
            facts: this rank's arguments, described by their path in the tree.
            error: why this rank cannot take part. Where all ranks say the same, the caller raises it.
            remedy: for facts that differ.
        """
        self.note_training_thread()
        if self.size == 1 or self.debug is False:
            return
        description = (call, error, dict(sorted(facts().items())))
        with self.explained(call):
            assert self.watch is not None
            self._comparisons += 1
            digest = hashlib.sha256(repr(description).encode()).hexdigest()
            self._pending_comparison = self._comparisons, call, time.time()
            same = self.watch.compare(self._group, self._comparisons, digest, self.timeout)
            self._pending_comparison = None
        if not same:
            raise WorldError(describe_difference(self.gather_objects(description), remedy))

    @contextmanager
    def in_turn(self, call: str, first: bool) -> Iterator[None]:
        """Run the block on ranks that pass ``first=True``, then on the others, which wait while those are alive."""
        if self.size == 1:
            yield
            return
        assert self.watch is not None
        self._turns += 1
        turn = self._turns
        self.note_training_thread()
        if first:
            try:
                yield
            finally:
                with self.explained(call):
                    self.watch.arrive(self._group, turn)
            self.settle()
        else:
            with self.explained(call):
                self.watch.arrive(self._group, turn)
                self.watch.wait_for_all(self._group, turn, self.timeout)
            self.settle()
            yield

    def settle(self) -> None:
        """Let parts merge what ranks did alone. All ranks are at one point of the program."""
        for merge in self.parts.settle:
            merge()

    # -- collectives --------------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until every rank is here. On gloo a missing rank is named."""
        if self.size == 1:
            return
        self._barriers += 1  # gloo's are in no flight recorder
        with self.explained("barrier"):
            if self.device.type == "cuda":
                dist.barrier(device_ids=[self.device.index])
            elif self.backend == "gloo":
                dist.monitored_barrier(timeout=timedelta(seconds=self.timeout), wait_all_ranks=True)
            else:
                dist.barrier()

    def reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """A new tensor of the same shape and dtype, reduced over the ranks. Means of integers round toward zero."""
        if self.size == 1:
            return tensor.clone()
        reduced = tensor.detach().clone(memory_format=torch.contiguous_format)
        if tensor.dtype.is_complex:
            raise WorldError(f"reduce of {tensor.dtype} is not defined: pass torch.view_as_real(tensor)")
        if tensor.dtype not in MOVABLE:
            reduced = reduced.to(torch.float32 if tensor.is_floating_point() else torch.int32)
        with self.explained(f"reduce ({op})"):
            dist.all_reduce(reduced, OPS[op])
        if op == "mean":
            reduced = reduced.div(self.size, rounding_mode=None if reduced.is_floating_point() else "trunc")
        return reduced.to(tensor.dtype)

    def average_(self, tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
        """Replace floating-point tensors by their mean over the ranks (of `group`), in place, in few collectives."""
        size = dist.get_world_size(group) if self.size > 1 else 1
        if size == 1:
            return
        for bucket in _take_tensors([t.detach() for t in tensors], BUCKET):
            flat = _flatten_dense_tensors(bucket)
            with self.explained("averaging of gradients"):
                dist.all_reduce(flat, group=group)
            for tensor, mean in zip(bucket, _unflatten_dense_tensors(flat.div_(size), bucket)):
                tensor.copy_(mean)

    def gather(self, tensor: Tensor, step: int = 1) -> Tensor:
        """All ranks' tensors, joined along dimension 0, on every rank. Scalars become one element; shapes must agree.

        Where `step` neighbouring ranks hold the same tensor, only those of ranks 0, `step`, 2 × `step` … are joined.
        """
        tensor = tensor.detach()
        if tensor.ndim == 0:
            tensor = tensor[None]
        if self.size == 1:
            return tensor
        sent = tensor.contiguous()
        if tensor.dtype not in MOVABLE:
            sent = sent.to(torch.uint8) if tensor.dtype == torch.bool else sent.view(torch.uint8)
        received = [torch.empty_like(sent) for _ in range(self.size)]
        with self.explained("gather"):
            dist.all_gather(received, sent)
        joined = torch.cat(received[::step])
        return joined.bool() if tensor.dtype == torch.bool else joined.view(tensor.dtype)

    def gather_uneven(self, tensor: Tensor, step: int = 1) -> Tensor:
        """As `gather`, where dimension 0 may differ between the ranks."""
        tensor = tensor.detach()
        if tensor.ndim == 0 or self.size == 1:
            return self.gather(tensor, step)
        lengths = self.gather(torch.tensor(len(tensor), device=tensor.device)).tolist()
        longest = max(lengths)
        padded = tensor.new_zeros((longest, *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        chunks = self.gather(padded, step).split(longest) if longest else [padded]
        return torch.cat([chunk[:length] for chunk, length in zip(chunks, lengths[::step])])

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """The tensor of rank `source`, as a new tensor on every rank; shapes must agree."""
        if self.size == 1:
            return tensor
        copied = tensor.detach().clone(memory_format=torch.contiguous_format)
        with self.explained("broadcast"):
            dist.broadcast(copied if copied.dtype in MOVABLE else copied.reshape(-1).view(torch.uint8), source)
        return copied

    def transfer(self, tensor: Tensor, source: int, target: int) -> Tensor:
        """Copy a contiguous tensor of rank `source` into that of rank `target`. Other ranks do nothing."""
        if source != target:
            with self.explained("transfer"):
                if self.rank == source:
                    dist.send(tensor, target)
                elif self.rank == target:
                    dist.recv(tensor, source)
        return tensor

    def gather_objects(self, item: Any) -> list[Any]:
        """One Python object a rank, in rank order, on every rank."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        with self.explained("gather of objects"):
            dist.all_gather_object(items, item)
        return items

    def broadcast_objects(self, items: list[Any], source: int = 0, group: Any = None) -> list[Any]:
        """Rank `source`'s list on every rank, in place, too; from host to host if possible. Lengths must agree."""
        if self.size > 1:
            with self.explained("broadcast of objects"):
                dist.broadcast_object_list(items, source, group)
        return items

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on at least one rank."""
        return bool(self.reduce(torch.tensor(int(flag), device=self.device), "max").item())

    # -- when it goes wrong -------------------------------------------------------------------------------------------

    @contextmanager
    def explained(self, call: str) -> Iterator[None]:
        """Turn a backend's bare timeout inside the block into a WorldError that says where each rank is."""
        if self._has_ended:
            raise WorldError(f"{call} after end_training(): this process has left the others. Call end_training() last")
        try:
            yield
        except RuntimeError as error:
            self.blame(error, call)
            raise

    def blame(self, error: RuntimeError, call: str) -> None:
        """Raise a WorldError with the position of every rank where another rank caused `error`."""
        if self.watch is not None and not isinstance(error, WorldError) and Watch.caused_by_peer(error):
            reason = str(error).splitlines()[0]
            raise WorldError(f"rank {self.rank} gave up in {call}: {reason}\n{self.watch.report()}") from error


def check_backend(backend: str | None, device: torch.device) -> None:
    """Raise RefusedError for a `backend` that is not the one of collectives on `device`; None passes."""
    name = BACKENDS.get(device.type, "gloo")
    if backend is not None and backend not in (name, name.rpartition(":")[2]):
        raise RefusedError(f"backend={backend!r} on {device.type}: collectives there are {name!r}. Leave it out")


# -- the store and the hosts of a run ----------------------------------------------------------------------------------


def _sign_in(ranks: Ranks, timeout: float) -> Mailbox:
    """The mailbox in which all ranks have signed in with their hosts, under ``host/rank``."""
    try:
        mailbox = Mailbox.open(_open_store(ranks, timedelta(seconds=timeout)), "world", ranks.rank, ranks.size)
        mailbox.barrier("host", timeout, _host().encode())
    except dist.DistNetworkError:
        # This was the store of rank 0's last world, which closed just now: an object there, such as a sharded model
        # before its collection, still held it. The next store opens at the same port.
        return _sign_in(ranks, timeout)
    except TimeoutError as error:
        missing = ", ".join(map(str, error.args[0]))
        absence = f"but rank {missing} did not arrive within {timeout:g} s"
        if ranks.meeting is None:
            raise WorldError(
                f"WORLD_SIZE={ranks.size} was announced, {absence}: start all {ranks.size} (`easymp launch --processes "
                f"{ranks.size} script.py` does), or unset RANK and WORLD_SIZE to train in one process"
            ) from error
        remedy = "start the training in all of them, or in a job of one"
        raise WorldError(f"{ranks.announced} announced {ranks.size} tasks, {absence}: {remedy}") from error
    return mailbox


def _open_store(ranks: Ranks, limit: timedelta) -> dist.Store:
    if ranks.size == 1:  # no port, and no look-up of names
        return dist.HashStore()
    address, port = ranks.meeting or (env.read("MASTER_ADDR"), env.integer("MASTER_PORT"))
    if address is None or port is None:
        missing = "MASTER_ADDR" if address is None else "MASTER_PORT"
        raise WorldError(
            f"WORLD_SIZE={ranks.size} is in the environment but {missing} is not: a launcher sets it. Start with "
            f"`easymp launch --processes {ranks.size} script.py`, or export {missing} (127.0.0.1 and any free port)"
        )
    shared = env.flag("TORCHELASTIC_USE_AGENT_STORE", False)
    store: dist.Store
    try:
        if shared:
            store = next(iter(dist.rendezvous("env://", ranks.rank, ranks.size, timeout=limit)))[0]
        else:
            listener = None
            if not ranks.unknown and ranks.local_size == ranks.size:  # out of other machines' reach
                address = LOOPBACK
                if ranks.rank == 0:
                    # The store of this process's last world may have the port, and is shared; of another program
                    # torch's own attempt says more.
                    with suppress(OSError):
                        listener = socket.create_server((LOOPBACK, port)).detach()
            store = dist.TCPStore(
                address,
                port,
                is_master=ranks.rank == 0,
                timeout=limit,
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=listener,
            )
    except (dist.DistStoreError, dist.DistNetworkError, RuntimeError) as error:
        raise WorldError(
            f"rank {ranks.rank} of {ranks.size} could not reach rank 0 at {address}:{port} within "
            f"{limit.total_seconds():g} s ({str(error).splitlines()[0]}): check that rank 0 runs, and that MASTER_ADDR "
            "and MASTER_PORT are right and free"
        ) from error
    # torchrun's agent keeps its store over a restart, with the keys of earlier attempts. Nodes may count restarts
    # differently, because one that came later had none; a store of rank 0's own is new in each attempt.
    attempt = env.integer("TORCHELASTIC_RESTART_COUNT", 0) if shared else 0
    return dist.PrefixStore(f"easymp/{attempt}", store)


def _host() -> str:
    """The host, its last start, and the container: equal for processes that see the same devices."""
    facts = [socket.gethostname()]
    with suppress(OSError):
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        facts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(facts)


_signed_in: list[Mailbox] = []  # of `locate`, for the world that is made next


def locate(ranks: Ranks, timeout: float) -> Ranks:
    """`ranks` with local rank and size, counted by host where no launcher set them, and put into the environment."""
    if not ranks.unknown:
        return ranks
    if dist.is_initialized():
        mailbox = Mailbox.open(dist.distributed_c10d._get_default_store(), "easymp/hosts", ranks.rank, ranks.size)
        mailbox.barrier("host", timeout, _host().encode())
    else:
        mailbox = _sign_in(ranks, timeout)
        _signed_in[:] = [mailbox]
    hosts = [mailbox.read(key).decode() for key in mailbox.of_ranks("host")]
    host = hosts[ranks.rank]
    local_rank = ranks.local_rank if ranks.unknown == "size" else hosts[: ranks.rank].count(host)
    local_size = max(hosts.count(host), local_rank + 1)
    env.put({"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(local_size)})
    return ranks._replace(local_rank=local_rank, local_size=local_size, unknown="")


# -- differences between ranks, for messages ---------------------------------------------------------------------------


def odd_one_out(values: list[Any], verb: str = "has", ranks: Sequence[int] | None = None) -> str:
    """Sentence part that names the ranks whose value is not the common one: ``"rank 2 has X, the others Y"``."""
    common = max(values, key=values.count)
    has_majority = values.count(common) * 2 > len(values)
    pairs = zip(range(len(values)) if ranks is None else ranks, values)
    listed = ", ".join(f"rank {r} {verb} {v}" for r, v in pairs if not has_majority or v != common)
    return f"{listed}, the others {common}" if has_majority else listed


def describe_difference(descriptions: list[tuple[str, str, dict[str, str]]], remedy: str) -> str:
    """The first difference of the ranks' calls (see `World.compare`): the call, an error, or an argument."""
    calls, errors, facts = zip(*descriptions)
    if len(set(calls)) > 1:
        different = odd_one_out(list(calls), "calls")
        return f"the ranks call different collectives: {different}. All ranks must make the same calls in one order"
    if any(errors):
        errors_text = "; ".join(f"rank {rank}: {error}" for rank, error in enumerate(errors) if error)
        return f"{calls[0]} cannot run, because of what some of the ranks passed. {errors_text}"
    by_path = {path: [rank_facts.get(path, "nothing") for rank_facts in facts] for path in sorted(set().union(*facts))}
    path, values = next((path, values) for path, values in by_path.items() if len(set(values)) > 1)
    return f"{calls[0]}: the ranks pass different things{path and f' at {path}'}: {odd_one_out(values)}. {remedy}"


def first_difference(lists: Sequence[Sequence[str]]) -> list[str]:
    """The first line that is not the same in all of a rank's `lists`, as each has it; nothing where they are equal."""
    rows = zip_longest(*lists, fillvalue="nothing more")
    return next((list(row) for row in rows if len(set(row)) > 1), [])


def forget_meshes() -> None:
    """Empty DTensor's caches, which belong to a world that has ended.

    Their keys are meshes, equal if shape, names and devices are: a later world would get layouts with the old groups
    and, if this rank's number changed, wrong lengths of uneven shards.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    # Imported here: half a second that runs without DTensors do not need.
    from torch.distributed import device_mesh
    from torch.distributed.tensor import DTensor, _collective_utils, _random, _redistribute

    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache.cache_clear()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    _redistribute._gen_transform_infos.cache_clear()
    # Not every version of torch has these, of which the last three are those of 2.8.
    getattr(_redistribute, "clear_redistribute_planner_cache", list)()
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", list)()
    for name in ("child_to_root_mapping", "root_to_flatten_mapping", "flatten_name_to_root_dims"):
        getattr(device_mesh._mesh_resources, name, {}).clear()
    _random._rng_tracker = None  # all ranks of the next world agree on their random numbers anew
