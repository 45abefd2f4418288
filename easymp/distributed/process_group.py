"""The world: this process and the other ranks. Every collective is the identity at size 1.

Joining: a store (that of torchrun's agent, else rank 0 opens one); every rank signs in there, so that a missing rank has a name; then
the process group. Leaving, in the order that never deadlocked: drop the wrappers of models, collect garbage, say farewell in the store
and wait for the others' farewells, destroy.
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

from ..base import env
from ..base.ranks import LOOPBACK, Ranks
from ..base.rng import TORCH
from ..errors import ALIKE, RefusedError, WorldError, failing
from .hang_report import Watch, collectives
from .hang_watch import HANG, LAST, HangWatch

_ops = dist.ReduceOp
# Means are sums, then divided: gloo has no average of integers.
OPS = {"sum": _ops.SUM, "mean": _ops.SUM, "max": _ops.MAX, "min": _ops.MIN, "product": _ops.PRODUCT}

# Types that every backend moves. Others travel as bytes (gather, broadcast) or through int32 (reduce).
MOVABLE = {
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.int8,
}  # fmt: skip

BUCKET = 2**26  # bytes averaged at a time
# A group that is bound to its device connects at once, and parts of it (those of a mesh of two dimensions) are split from it. Before
# 2.10 torch splits no group of two backends: 2.8 stops with an assertion, and in 2.9 gloo's parts meet under one name.
BINDS = TORCH >= (2, 10)
BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}  # "gloo" elsewhere
FAREWELL = 10.0  # seconds to wait for the others before leaving


class World:
    """This process and its peers.

    Args:
        device: where its tensors are; becomes this process's current one, so that nothing of it ends up on the first.
        timeout: seconds that a collective may wait for the other ranks.
        debug: False: do not compare the ranks' arguments of collectives that a script calls (`compare`). True: zero1 also compares
            the number of gradients in each step.
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
        self.settling: list[Callable[[], None]] = []  # see `settle`
        self.forwards = 0  # of models with a forward that needs every rank
        self.carried: list[Any] = []  # state of gradient hooks that a later world of this process takes over
        self.owned = False  # whether we started the process group, and so end it
        self.watch: Watch | None = None  # listens for the other ranks; None in a world of one
        self.hangs: HangWatch | None = None  # see `name_hangs`
        # Number and name of the call that `compare` compares, and since when.
        self.meeting: tuple[int, str, float] | None = None
        self._process = os.getpid()
        self._left = False
        self._store: dist.Store | None = None
        self._base: dist.Store | None = None  # in which the groups are counted
        self._number = 0  # of the group that runs, the same on all ranks
        self._compared = self._turns = 0  # calls of `compare` and `in_turn` in this group
        self._barriers = 0
        self._ending = threading.Lock()
        if not ranks.announced:
            return
        if not dist.is_initialized():
            self._connect(_signed_in.pop() if _signed_in else _sign_in(self.ranks, self.timeout)[0])
            self.owned = True
        self.backend = dist.get_backend()
        self._store = dist.distributed_c10d._get_default_store()
        if self.size > 1:
            self.watch = Watch(self.rank, self.size, self._store, self._abort)
        atexit.register(self.close)  # a thread that sleeps in the store must not outlive the interpreter

    # -- joining and leaving ------------------------------------------------------------------------------------------

    def _connect(self, store: dist.Store) -> None:
        # Each group has a place of its own in the store, counted there: a process that started later, or lived through other worlds,
        # would count differently.
        self._base = store
        number = self._number = store.add(f"groups/{self.rank}", 1)
        self._compared = self._turns = 0
        # Its functions have the default group as default arguments: imported later (the first DDP does), it would keep this group's
        # connections open for good, and ranks that wait for this one would not hear that it left.
        importlib.import_module("torch.distributed.nn.functional")
        own = dist.PrefixStore(f"group/{number}", store)
        # torch warns that a message to one rank shares its stream with the group's collectives: nothing here minds their order.
        serial = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
        wanted = {"TORCH_FR_BUFFER_SIZE": str(LAST), serial: "0"}
        limit = timedelta(seconds=self.timeout)
        with env.override(**{name: env.read(name, value) for name, value in wanted.items()}):
            dist.init_process_group(
                BACKENDS.get(self.device.type, "gloo"),
                store=own,
                rank=self.rank,
                world_size=self.size,
                timeout=limit,
                device_id=self.device if self.device.type == "cuda" and BINDS else None,
            )
        if not hasattr(dist.ProcessGroupGloo, "set_timeout"):
            # In torch 2.8 gloo takes a group's timeout when the group is made, and never again (`hurry_groups`).
            dist.distributed_c10d.default_pg_timeout = limit
        # A rank that fails at once would look like a failed connection to ranks that are not connected yet.
        try:
            own.set(f"connected/{self.rank}", "")
            own.wait([f"connected/{rank}" for rank in range(self.size)], limit)
        except RuntimeError as error:
            raise WorldError(
                f"rank {self.rank} of {self.size} is connected, and not all others were within {self.timeout:g} s "
                f"({str(error).splitlines()[0]}): see their output"
            ) from error

    def close(self) -> None:
        """Leave the world, and end a process group that was started here. Wrappers of models must be gone: they can deadlock."""
        atexit.unregister(self.close)
        if self._process != os.getpid():
            return  # a forked child that ends: the connections are its parent's
        if self.hangs is not None:
            self.hangs.close()
            self.hangs = None
        reachable = self.watch is None or self.watch.reachable()
        if self.watch is not None:
            self.watch.leave((self._number, self._compared + 1))
            self.watch.close()
            self.watch = None
        if self.owned and dist.is_initialized():
            gc.collect()
            # A process that ends by an error does not wait, so that the others hear of it at once.
            if reachable:
                self._say_farewell(0.0 if failing() else min(self.timeout, FAREWELL))
            dist.destroy_process_group()
            dist.distributed_c10d.default_pg_timeout = dist.constants.default_pg_timeout
            forget_meshes()
            self._left = True
        self.owned = False

    def _say_farewell(self, seconds: float) -> None:
        """Tell the others that this rank leaves, and wait for them to say the same, by polling, which prints nothing when they are late."""
        assert self._store is not None  # the group's own part of it
        deadline, pause = time.monotonic() + seconds, 0.001
        try:
            self._store.set(f"farewell/{self.rank}", "")
            keys = [f"farewell/{r}" for r in range(self.size)]
            while time.monotonic() < deadline and not self._store.check(keys):
                time.sleep(pause)
                pause = min(2 * pause, 0.1)
        except RuntimeError:
            pass  # rank 0 and its store are gone

    def group(self, ranks: Iterable[int]) -> dist.ProcessGroup:
        """A group of these ranks, with the world's timeout; a collective of all ranks."""
        return dist.new_group(list(ranks), timeout=timedelta(seconds=self.timeout))

    def hurry_groups(self) -> None:
        """Give every group that this rank is in the world's timeout; torch gives those of a mesh 30 minutes."""
        if self.size > 1:
            # Public in torch 2.15, which warns of the name it had before.
            set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
            for group in list(dist.distributed_c10d._world.pg_map):
                set_timeout(timedelta(seconds=self.timeout), group)

    def store(self) -> dist.Store:
        """A connection of its own to the store that all ranks share."""
        assert self._store is not None, "a world of one has no store"
        return self._store.clone()

    def break_off(self) -> None:
        """Cut this rank's connections, so that ranks that wait for it in a collective get an error now. `restart` follows."""
        if self.watch is not None:
            self.watch.leave((self._number, self._compared + 1))
            if self.device.type != "cpu":  # their kernels wait on the device, which sees no closed socket
                self.watch.abort_others(self._number)
        self._abort(self._number)

    def _abort(self, number: int) -> None:
        """End group `number`, if it still runs; also called in the listener's thread."""
        with self._ending:
            if number != self._number or not dist.is_initialized():
                return
            if self.device.type == "cuda":
                # Destroying it would wait for collectives that others have broken off or never come to.
                dist.distributed_c10d._abort_process_group()
            else:
                dist.destroy_process_group()

    def restart(self) -> None:
        """Begin again over fresh connections, on all ranks together, after one of them broke off."""
        self._abort(self._number)
        forget_meshes()
        assert self._store is not None
        self._connect(self._base or self._store)  # a store of a group's own would count from 1 again
        if self.hangs is not None:
            self.hangs.since = time.time()

    def name_hangs(self, after: float, folder: str | None) -> None:
        """From now on report a collective that has waited for `after` seconds (0: none do), once in a process."""
        if self.watch is not None and after and not any(t.name == HANG for t in threading.enumerate()):
            here = Path(os.curdir if folder is None or "://" in folder else folder)
            self.hangs = HangWatch(self.watch, self.store(), after, here, lambda: self.meeting)

    # -- calls of a script --------------------------------------------------------------------------------------------

    def has_left(self, rank: int) -> bool:
        """Whether another rank has left the run."""
        return self.watch is None or self.watch.has_left(self._number, rank)

    def position(self) -> dict[str, int]:
        """How many meetings of the ranks this one has begun, by kind and group. All ranks begin them in one order."""
        counted = {"compare": self._compared, "turn": self._turns, "barrier": self._barriers}
        return {**counted, **collectives()}

    def trains_here(self) -> None:
        """Report the line of this thread as the place of this rank, when the others wait for it."""
        if self.watch is not None:
            self.watch.trains = threading.get_ident()

    def compare(
        self, call: str, facts: Callable[[], dict[str, str]] = dict, error: str = "", remedy: str = ALIKE
    ) -> None:
        """Before a collective that a script calls: raise one error on all ranks where their calls differ. They compare in the store.

        Args:
            call: name and arguments, which must be the same.
            facts: a description of this rank's arguments, by their place in the tree.
            error: why this rank cannot take part. Where all ranks say the same, the caller raises it.
            remedy: what to do where facts differ.
        """
        self.trains_here()
        if self.size == 1 or self.debug is False:
            return
        own = (call, error, facts())
        with self.explained(call):
            assert self.watch is not None
            self._compared += 1
            said = hashlib.sha256(repr((call, error, sorted(own[2].items()))).encode()).hexdigest()
            self.meeting = self._compared, call, time.time()
            alike = self.watch.compare((self._number, self._compared), said, self.timeout)
            self.meeting = None
        if not alike:
            raise WorldError(unlike(self.gather_objects(own), remedy))

    @contextmanager
    def in_turn(self, call: str, first: bool) -> Iterator[None]:
        """The ranks with `first` run the block before the others, which wait as long as those are alive."""
        if self.size == 1:
            yield
            return
        assert self.watch is not None
        self._turns += 1
        turn = (self._number, self._turns)
        self.trains_here()
        if not first:
            with self.explained(call):
                self.watch.come(turn)
                self.watch.wait_for_all(turn, self.timeout)
            self.settle()
        try:
            yield
        finally:
            if first:
                with self.explained(call):
                    self.watch.come(turn)
        if first:
            self.settle()

    # -- collectives --------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Call the functions of `settling`, which merge what ranks did alone; all ranks are at one point of the program."""
        for act in self.settling:
            act()

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
        """A new tensor of the same shape and dtype, reduced over the ranks. The mean of integers is rounded toward zero."""
        if self.size == 1:
            return tensor.clone()
        moved = tensor.detach().clone(memory_format=torch.contiguous_format)
        if tensor.dtype not in MOVABLE:
            moved = moved.to(torch.float32 if tensor.is_floating_point() else torch.int32)
        if tensor.dtype.is_complex:
            raise WorldError(f"reduce of {tensor.dtype} is not defined: pass torch.view_as_real(tensor)")
        with self.explained(f"reduce ({op})"):
            dist.all_reduce(moved, OPS[op])
        if op == "mean":
            rounding = None if moved.is_floating_point() else "trunc"
            moved = moved.div(self.size, rounding_mode=rounding)
        return moved.to(tensor.dtype)

    def average_(self, tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
        """Replace floating-point tensors by their mean over the ranks (of `group`), in place, in a few flat collectives."""
        size = dist.get_world_size(group) if self.size > 1 else 1
        if size == 1:
            return
        for some in _take_tensors([t.detach() for t in tensors], BUCKET):
            flat = _flatten_dense_tensors(some)
            with self.explained("averaging of gradients"):
                dist.all_reduce(flat, group=group)
            for tensor, part in zip(some, _unflatten_dense_tensors(flat.div_(size), some)):
                tensor.copy_(part)

    def gather(self, tensor: Tensor, every: int = 1) -> Tensor:
        """All ranks' tensors, joined along dimension 0, on every rank; scalars become one element each, and shapes must agree.

        `every`: keep ranks 0, `every`, 2 × `every` … only, where so many neighbours hold the same.
        """
        tensor = tensor.detach()
        if tensor.ndim == 0:
            tensor = tensor[None]
        if self.size == 1:
            return tensor
        moved = tensor.contiguous()
        if tensor.dtype not in MOVABLE:
            moved = moved.view(torch.uint8) if tensor.dtype != torch.bool else moved.to(torch.uint8)
        parts = [torch.empty_like(moved) for _ in range(self.size)]
        with self.explained("gather"):
            dist.all_gather(parts, moved)
        whole = torch.cat(parts[::every])
        if tensor.dtype in MOVABLE:
            return whole
        return whole.bool() if tensor.dtype == torch.bool else whole.view(tensor.dtype)

    def gather_uneven(self, tensor: Tensor, every: int = 1) -> Tensor:
        """As `gather`, where dimension 0 may differ between the ranks."""
        tensor = tensor.detach()
        if tensor.ndim == 0 or self.size == 1:
            return self.gather(tensor, every)
        lengths = self.gather(torch.tensor(len(tensor), device=tensor.device)).tolist()
        padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        parts = self.gather(padded, every).split(max(lengths)) if max(lengths) else [padded]
        return torch.cat([part[:length] for part, length in zip(parts, lengths[::every])])

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """The tensor of rank `source`, as a new tensor on every rank; shapes must agree."""
        if self.size == 1:
            return tensor
        moved = tensor.detach().clone(memory_format=torch.contiguous_format)
        flat = moved if moved.dtype in MOVABLE else moved.reshape(-1).view(torch.uint8)
        with self.explained("broadcast"):
            dist.broadcast(flat, source)
        return moved

    def gather_objects(self, item: Any) -> list[Any]:
        """One Python object a rank, in rank order, on every rank."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        with self.explained("gather of objects"):
            dist.all_gather_object(items, item)
        return items

    def broadcast_objects(self, items: list[Any], source: int = 0, group: Any = None) -> list[Any]:
        """Rank `source`'s list on every rank, in place, too; lengths must agree. It goes from host to host where the backend can."""
        if self.size > 1:
            with self.explained("broadcast of objects"):
                dist.broadcast_object_list(items, source, group)
        return items

    def send(self, tensor: Tensor, target: int) -> None:
        """Hand a tensor to rank `target`, which calls `receive`; the other ranks have no part in it."""
        flat = tensor.detach().to(self.device).reshape(-1).view(torch.uint8)
        with self.explained(f"sending to rank {target}"):
            dist.send(flat, target)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """The tensor of that shape and dtype that rank `source` sends."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        with self.explained(f"receiving from rank {source}"):
            dist.recv(tensor.view(-1).view(torch.uint8), source)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on at least one rank."""
        if self.size == 1:
            return bool(flag)
        return bool(self.reduce(torch.tensor(int(flag), device=self.device), "max").item())

    # -- when it goes wrong -------------------------------------------------------------------------------------------

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Turns a backend's bare timeout inside the block into a WorldError that says where each rank is."""
        if self._left:
            raise WorldError(
                f"{what} after end_training(): this process has left the others. Call end_training() last"
            )
        try:
            yield
        except RuntimeError as error:
            self.blame(error, what)
            raise

    def blame(self, error: RuntimeError, what: str) -> None:
        """Raise a WorldError with the place of every rank where another rank caused `error`."""
        if self.watch is not None and not isinstance(error, WorldError) and Watch.caused_by_peer(error):
            said = str(error).splitlines()[0]
            raise WorldError(f"rank {self.rank} gave up in {what}: {said}\n{self.watch.report()}") from error


def check_backend(backend: str | None, device: torch.device) -> None:
    """Raises RefusedError for another `backend` than the one of collectives on `device`; None is any."""
    there = BACKENDS.get(device.type, "gloo")
    if backend is not None and backend not in (there, there.rpartition(":")[2]):
        raise RefusedError(
            f"backend={backend!r} on {device.type}: collectives there are {there!r}. Leave it out"
        )


def _sign_in(ranks: Ranks, timeout: float) -> tuple[dist.Store, list[str]]:
    """The store that all ranks share, once all of them have signed in, and its keys of their hosts, by rank."""
    limit = timedelta(seconds=timeout)
    store = _open_store(ranks, limit)
    try:
        number = store.add(f"worlds/{ranks.rank}", 1)
        keys = [f"world/{number}/{r}" for r in range(ranks.size)]
        store.set(keys[ranks.rank], _host())
        store.wait(keys, limit)
    except dist.DistNetworkError:
        # This was the store of rank 0's last world, which closed just now: an object there still held it, such as a sharded model
        # before its collection. The next store opens at the same place; if rank 0 is gone, the error says so.
        return _sign_in(ranks, timeout)
    except (dist.DistStoreError, RuntimeError) as error:
        missing = [str(r) for r in range(ranks.size) if not store.check([keys[r]])]
        late = f"rank {', '.join(missing)} did not arrive within {timeout:g} s: start"
        raise WorldError(
            f"WORLD_SIZE={ranks.size} was announced, but {late} all {ranks.size} (`easymp launch --processes {ranks.size} script.py` "
            "does), or unset RANK and WORLD_SIZE to train in one process"
            if ranks.meeting is None
            else f"{ranks.announced} announced {ranks.size} tasks, but {late} the training in all of them, or in a job of one"
        ) from error
    return store, keys


def _open_store(ranks: Ranks, limit: timedelta) -> dist.Store:
    if ranks.size == 1:  # no port, and no look-up of names
        return dist.HashStore()
    address, port = ranks.meeting or (env.read("MASTER_ADDR"), env.integer("MASTER_PORT"))
    if address is None or port is None:
        missing = "MASTER_ADDR" if address is None else "MASTER_PORT"
        raise WorldError(
            f"WORLD_SIZE={ranks.size} is in the environment but {missing} is not: a launcher sets it. Start with "
            f"`easymp launch --processes {ranks.size} script.py`, or export {missing} (127.0.0.1 and a free port will do)"
        )
    shared = env.flag("TORCHELASTIC_USE_AGENT_STORE", False)
    try:
        if shared:
            store = next(iter(dist.rendezvous("env://", ranks.rank, ranks.size, timeout=limit)))[0]
        else:
            kept = None
            if not ranks.unknown and ranks.local_size == ranks.size:  # out of other machines' reach
                address = LOOPBACK
                if ranks.rank == 0:
                    # The port may be taken: by the store of this process's last world, which the next one shares, or by another
                    # program; torch's own attempt says more then.
                    with suppress(OSError):
                        kept = socket.create_server((LOOPBACK, port)).detach()
            options = {"wait_for_workers": False, "multi_tenant": True, "master_listen_fd": kept}
            store = dist.TCPStore(address, port, None, ranks.rank == 0, limit, **options)
    except (dist.DistStoreError, dist.DistNetworkError, RuntimeError) as error:
        raise WorldError(
            f"rank {ranks.rank} of {ranks.size} could not reach rank 0 at {address}:{port} within {limit.total_seconds():g} s "
            f"({str(error).splitlines()[0]}): check that rank 0 runs, and that MASTER_ADDR and MASTER_PORT are right and free"
        ) from error
    # torchrun's agent keeps its store over a restart: keys of an earlier attempt are not ours. A store of rank 0's own is as new as
    # the attempt, and nodes may count their restarts differently: one that came later had none.
    attempt = env.integer("TORCHELASTIC_RESTART_COUNT", 0) if shared else 0
    return dist.PrefixStore(f"easymp/{attempt}", store)


def _host() -> str:
    """Equal for processes that see the same devices by the same numbers: the host, its last start, and the container."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


_signed_in: list[dist.Store] = []  # of `locate`, for the world that is made next


def locate(ranks: Ranks, timeout: float) -> Ranks:
    """`ranks` with local rank and size, counted by host where no launcher announced them; then all ranks take part.

    LOCAL_RANK and LOCAL_WORLD_SIZE are set in the environment, as torchrun sets them. `timeout` is in seconds.
    """
    if not ranks.unknown:
        return ranks
    if dist.is_initialized():
        store = dist.PrefixStore("easymp/hosts", dist.distributed_c10d._get_default_store())
        keys = [str(rank) for rank in range(ranks.size)]
        store.set(keys[ranks.rank], _host())
        store.wait(keys, timedelta(seconds=timeout))
    else:
        store, keys = _sign_in(ranks, timeout)
        _signed_in[:] = [store]
    hosts = [store.get(key) for key in keys]
    own = hosts[ranks.rank]
    local = ranks.local_rank if ranks.unknown == "size" else hosts[: ranks.rank].count(own)
    beside = max(hosts.count(own), local + 1)
    env.put({"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(beside)})
    return ranks._replace(local_rank=local, local_size=beside, unknown="")


def odd_one_out(values: list[Any], verb: str = "has", ranks: Sequence[int] | None = None) -> str:
    """Sentence part that names the ranks whose value is not the common one: ``"rank 2 has X, the others Y"``."""
    common = max(values, key=lambda v: (values.count(v), -values.index(v)))
    several = list(enumerate(values) if ranks is None else zip(ranks, values))
    if values.count(common) * 2 <= len(values):
        return ", ".join(f"rank {r} {verb} {v}" for r, v in several)
    odd = ", ".join(f"rank {r} {verb} {v}" for r, v in several if v != common)
    return f"{odd}, the others {common}"


def unlike(everyone: list[tuple[str, str, dict[str, str]]], remedy: str) -> str:
    """The first difference of the ranks' calls (see `World.compare`): the collective, an error of some ranks, or an argument."""
    calls, errors, facts = zip(*everyone)
    if len(set(calls)) > 1:
        return f"the ranks call different collectives: {odd_one_out(list(calls), 'calls')}. All ranks must make the same calls in one order"
    if any(errors):
        words = "; ".join(f"rank {rank}: {error}" for rank, error in enumerate(errors) if error)
        return f"{calls[0]} cannot run, because of what some of the ranks passed. {words}"
    every = {place: [each.get(place, "nothing") for each in facts] for place in sorted(set().union(*facts))}
    place, values = next((place, values) for place, values in every.items() if len(set(values)) > 1)
    return f"{calls[0]}: the ranks pass different things{place and f' at {place}'}: {odd_one_out(values)}. {remedy}"


def first_difference(lists: Sequence[Sequence[str]]) -> list[str]:
    """The first line that is not the same in all of a rank's `lists`, as each has it; nothing where they are equal."""
    places = zip_longest(*lists, fillvalue="nothing more")
    return next((list(lines) for lines in places if len(set(lines)) > 1), [])


def forget_meshes() -> None:
    """Empty DTensor's caches of a world that has ended.

    To torch two meshes are equal where their shapes, names and devices are. So a later world of this process would find layouts with the
    old groups and, as another rank, wrong lengths of uneven shards. The caches of torch's backward threads are out of reach.
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
