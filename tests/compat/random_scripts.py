"""Compare the layers with the libraries that they stand for, in random short scripts.

``python -m tests.compat.random_scripts [PEER …]`` needs the group of dependencies ``peers``. A script is a random
sentence of a grammar of calls that scripts use. It runs under the peer and under easymp's layer, and both must note the
same values. A difference has to be an error or a warning of easymp, or one of `ROWS`: what the peer's page tells.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import pickle
import random
import re
import socket
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

ROOT = Path(__file__).parents[2]
PAGES = {"accelerate": "accelerate", "lightning_fabric": "lightning-fabric", "torch_cuda": "torch-cuda-amp"}


class Row(NamedTuple):
    """A difference that a page tells."""

    peer: str
    labels: str  # of values that differ, or that come next where only one side raises an error; "" for all
    script: str  # a pattern that is in such a script
    words: str  # on docs/migrating/PAGE.md


ROWS = [
    Row("accelerate", "module reduce", "", "`reduce` honours its `scale`"),
    Row("accelerate", "predictions, metrics", "BatchSampler.*True", "keeps all samples of the last batch"),
    Row("accelerate", "skipped batches", "dispatch_batches=True", "`skip_first_batches` skips steps"),
    Row("accelerate", "", r"(?s)shuffle=True.*'first batch'", "a shuffled pass that a script leaves early"),
    Row(
        "accelerate", "", r"(?s)dispatch_batches=True.*BatchSampler[^\n]*True", "drops batches that do not fill a step"
    ),
]

# random_scripts.txt has rules by name, with an alternative at each "-". A line "@rule" stands for one alternative of a
# rule, "@rule*3" for up to three different ones, and [[a|b]] for one of its words.
GRAMMAR = Path(__file__).with_suffix(".txt").read_text()
RULES = {
    name: [alternative.replace("\n  ", "\n") for alternative in rule.removeprefix("- ").rstrip("\n").split("\n- ")]
    for name, _, rule in (part.partition("\n") for part in GRAMMAR.strip().removeprefix("# ").split("\n# "))
}


def expand(rule: str, draw: random.Random) -> list[str]:
    """The lines of a rule."""
    name, _, most = rule.partition("*")
    chosen = draw.sample(RULES[name], draw.randint(0, min(int(most), len(RULES[name]))) if most else 1)
    lines = []
    for line in "\n".join(chosen).splitlines():
        indent, _, inner = line.partition("@")
        if inner and not indent.strip():
            lines += [indent + code for code in expand(inner, draw)]
        else:
            lines.append(re.sub(r"\[\[(.*?)\]\]", lambda match: draw.choice(match[1].split("|")), line))
    return lines


def make_scripts(peer: str, count: int, seed: int) -> list[str]:
    return ["\n".join(expand(peer, random.Random(f"{peer} {seed + i}"))) for i in range(count)]


# -- what scripts find


def batch_of(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(i)
    return torch.randn(4, generator=generator), torch.randint(0, 2, (), generator=generator)


class Pairs(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __getitem__(self, i):
        return batch_of(i)


class Records(Pairs):
    def __getitem__(self, i):
        return dict(zip("xy", batch_of(i)))


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return map(batch_of, range(self.rows))


class Counts:
    value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Callback:
    def __init__(self, note):
        self.note = note

    def on_after_setup(self, module):
        self.note("set up", module.training)

    def on_anything(self, value):
        self.note("called", value)


def unpack(batch):
    return (batch["x"], batch["y"]) if isinstance(batch, dict) else batch


COMMON = [
    BatchSampler, Callback, Counts, DataLoader, Pairs, Records, SequentialSampler, Stream, nullcontext, unpack, nn, os,
    pickle, torch, functional,
]  # fmt: skip
NEEDED = """Accelerator DataLoaderConfiguration Fabric GradScaler GradientAccumulationPlugin autocast broadcast
    concatenate convert_file_size_to_int find_batch_size gather_object is_torch_version is_wrapped pad_across_processes
    reduce seed_everything send_to_device set_seed""".split()


def names_of(package: str) -> dict[str, object]:
    """What the scripts of `package` import."""
    if package == "torch_cuda":  # torch's own on the device that is here
        amp = {"GradScaler": functools.partial(torch.amp.GradScaler, "cpu")}
        amp["autocast"] = functools.partial(torch.autocast, "cpu", dtype=torch.float16)
        return amp
    modules = [importlib.import_module(package)]
    if not package.endswith("fabric"):
        modules.append(importlib.import_module(package + (".utils" if package.endswith("accelerate") else ".amp")))
    pairs = ((name, vars(module).get(name)) for module in modules for name in NEEDED)
    return {name: value for name, value in pairs if value is not None}


def plain(value: object) -> object:
    """A value that JSON keeps."""
    if isinstance(value, torch.Tensor):
        return value.detach().tolist()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in sorted(value.items(), key=str)}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return str(value) if isinstance(value, (str, torch.dtype, torch.device)) else type(value).__name__


def run_script(script: str, names: dict[str, object], folder: str) -> dict[str, object]:
    """What a script notes, its error, and the warnings of easymp."""
    notes: list[list[object]] = []
    error = None
    for variable in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ.pop(variable, None)
    torch.manual_seed(0)
    variables = {"note": lambda label, value: notes.append([label, plain(value)]), "folder": folder}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            exec(script, {**names, **variables, "world": int(os.environ.get("WORLD_SIZE", 1))})
        except Exception as raised:
            error = [[kind.__name__ for kind in type(raised).__mro__], f"{type(raised).__name__}: {raised}"]
    texts = [str(item.message) for item in caught if item.category.__name__ == "EasympWarning"]
    return {"notes": notes, "error": error, "warnings": texts}


def work(package: str, file: str, first: int) -> None:
    """Run the scripts of a file on this rank, and append their results to files."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(1)
    if world > 1:
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=10))
    names = {getattr(item, "__name__", "").rpartition(".")[2]: item for item in COMMON} | names_of(package)
    for i, script in enumerate(json.loads(Path(file).read_text())[first:], first):
        folder = f"{file}.{package}.folder{i}"
        os.makedirs(folder, exist_ok=True)
        result = run_script(script, names, folder)
        with open(f"{file}.{package}.{rank}", "a") as results:
            results.write(json.dumps(result) + "\n")
        if world > 1:  # ranks that no longer agree end here, and the next ones begin anew
            numbers = [None] * world
            torch.distributed.all_gather_object(numbers, i)
            assert numbers == [i] * world
        if package == "accelerate":
            state = importlib.import_module("accelerate.state")
            state.AcceleratorState._reset_state()
            state.GradientState._reset_state()
        elif "easymp.training.state" in sys.modules:
            for accelerator in sys.modules["easymp.training.state"].accelerators():
                accelerator.close()


# -- the comparison


def results_of(package: str, scripts: list[str], processes: int, file: Path) -> list[list[dict[str, object]]]:
    """The results of each script by rank."""
    file.write_text(json.dumps(scripts))
    outputs = [Path(f"{file}.{package}.{rank}") for rank in range(processes)]
    no_result = {"notes": [], "error": [[], "its processes ended or hung"], "warnings": []}
    done = 0
    while done < len(scripts):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
        command = [sys.executable, "-m", __spec__.name, "--work", package, str(file), str(done)]
        workers = []
        for rank in range(processes):
            rank_variables = {**group, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(processes)}
            environment = {
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "ACCELERATE_USE_CPU": "true",
                "EASYMP_TIMEOUT": "10",
                "OMP_NUM_THREADS": "1",
            }
            environment |= rank_variables if processes > 1 else {}
            log = open(f"{file}.{package}.{rank}.log", "a")  # noqa: SIM115
            workers.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
        for worker in workers:
            worker.wait(timeout=1800)
        lines = [output.read_text().splitlines() if output.exists() else [] for output in outputs]
        if not max(map(len, lines)) > done:
            raise RuntimeError(Path(f"{file}.{package}.0.log").read_text()[-3000:])
        done = max(map(len, lines))
        for output, own_lines in zip(outputs, lines):
            output.write_text(
                "".join(f"{line}\n" for line in [*own_lines, *[json.dumps(no_result)] * (done - len(own_lines))])
            )
    by_rank = [[json.loads(line) for line in output.read_text().splitlines()] for output in outputs]
    return [list(ranks) for ranks in zip(*by_rank)]


def close(a: object, b: object) -> bool:
    """Whether two noted values are equal, numbers up to rounding."""
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and close(list(a.values()), list(b.values()))
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(close, a, b))
    if isinstance(a, (int, float)) and isinstance(b, (int, float)) and isinstance(a, bool) == isinstance(b, bool):
        return bool(torch.isclose(torch.tensor(float(a)), torch.tensor(float(b)), 1e-5, 1e-6, equal_nan=True))
    return bool(a == b)


def compare(peer: str, script: str, peer_result: dict[str, object], layer_result: dict[str, object]) -> tuple[str, str]:
    """Kind of a difference ("same", "error", "warning", "row" or "WRONG"), and what differs."""
    pairs = list(zip(peer_result["notes"], layer_result["notes"]))
    k = next((i for i, pair in enumerate(pairs) if not close(*pair)), len(pairs))
    before = f"after {peer_result['notes'][k - 1][0]!r}" if k else "at first"
    if k < len(pairs):
        label, text = layer_result["notes"][k][0], f"{peer_result['notes'][k]} is {layer_result['notes'][k]}"
    elif len(peer_result["notes"]) == len(layer_result["notes"]):
        if (peer_result["error"] is None) == (layer_result["error"] is None):
            return "same", ""
        label, text = before, f"{peer_result['error'] or 'no error'} is {layer_result['error'] or 'no error'}"
    elif len(peer_result["notes"]) > k:
        label, text = peer_result["notes"][k][0], f"{before} {layer_result['error']}, not {peer_result['notes'][k]}"
    else:
        label, text = layer_result["notes"][k][0], f"{before} no {peer_result['error']}"
    if layer_result["error"] and len(layer_result["notes"]) == k and "EasympError" in layer_result["error"][0]:
        return "error", f"{label}: {layer_result['error'][1]}"
    rows = [
        row
        for row in ROWS
        if row.peer == peer and label in (row.labels or label).split(", ") and re.search(row.script, script)
    ]
    if rows:
        return "row", rows[0].words
    warned = any(label in warning for warning in layer_result["warnings"])
    return ("warning" if warned else "WRONG"), f"{label}: {text} {layer_result['warnings']}"


def compare_all(peer: str, count: int, processes: int, seed: int, folder: Path) -> list[tuple[str, str, str]]:
    """Kind, description and script of each comparison."""
    scripts = make_scripts(peer, count, seed)
    packages = [peer, f"easymp.compat.{peer}"]
    file = folder / f"{peer}{processes}.json"
    peer_result, layer_result = (results_of(package, scripts, processes, file) for package in packages)
    kinds = ["same", "error", "warning", "row", "WRONG"]
    differences = []
    for script, *by_rank in zip(scripts, peer_result, layer_result):
        kind, text = max(
            (compare(peer, script, *pair) for pair in zip(*by_rank)), key=lambda item: kinds.index(item[0])
        )
        differences.append((kind, text, script))
    return differences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peers", nargs="*", default=list(PAGES))
    parser.add_argument("--scripts", type=int, default=200)
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=2, help="scripts of wrong differences")
    arguments = parser.parse_args()
    wrong = 0
    for peer in arguments.peers:
        for processes in arguments.processes[:1] if peer == "torch_cuda" else arguments.processes:
            with tempfile.TemporaryDirectory() as folder:
                differences = compare_all(peer, arguments.scripts, processes, arguments.seed, Path(folder))
            print(peer, processes, dict(Counter(kind for kind, *_ in differences)), flush=True)
            for (kind, text), times in Counter(
                (kind, text) for kind, text, _ in differences if kind != "same"
            ).most_common():
                print(f"  {times} {kind} {text}")
            for kind, _, script in [item for item in differences if item[0] == "WRONG"][: arguments.show]:
                print(f"--- {kind}\n{script}")
            wrong += sum(kind == "WRONG" for kind, *_ in differences)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main()
