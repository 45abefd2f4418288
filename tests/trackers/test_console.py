"""The console tracker: a line that updates on a terminal, whole lines elsewhere."""

from __future__ import annotations

import importlib.util
import io
import logging
import os
import re
import sys
import termios
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from easymp import Accelerator, SettingError
from easymp.trackers import console

from ..words import make_accelerator
from .runs import rows

pytest.importorskip("tqdm", reason="an optional package is not installed: tqdm (of the extra 'console')")


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.ones(12, 2))


def train(
    folder: Any,
    log_with: Any = "console",
    data: Any = None,
    logs: Any = lambda acc, update, loss: None,
    items: int | None = None,
    options: Any = None,
    accumulation: int = 1,
    until: int = 0,
    counted: bool = True,
) -> torch.Tensor:
    """Two epochs of three updates of two samples, or as far as `until`; returns the weights."""
    torch.manual_seed(0)
    options_by_name: dict[str, Any] = {"mixed_precision": "no", "gradient_accumulation_steps": accumulation}
    with make_accelerator(cpu=True, project_dir=folder, log_with=log_with, seed=0, **options_by_name) as acc:
        if options is not None:
            acc.init_trackers("run", init_kwargs={"console": options})
        model = torch.nn.Linear(2, 1)
        data = TensorDataset(torch.ones(6 * accumulation * acc.num_processes, 2)) if data is None else data
        optimizer = torch.optim.SGD(model.parameters(), 0.125)
        model, optimizer, loader = acc.prepare(model, optimizer, DataLoader(data, 2))
        acc.resume()
        for _ in acc.epochs(2) if counted else range(2):
            for batch in loader:
                x = batch if isinstance(batch, torch.Tensor) else batch[0]
                with acc.accumulate(model):
                    loss = model(x).sum() if items else model(x).mean()
                    acc.backward(loss, num_items=items)
                    optimizer.step()
                    optimizer.zero_grad()
                logs(acc, optimizer.updates, loss)
                if until and optimizer.updates == until:
                    acc.save_state()
                    return model.weight.detach()
        return model.weight.detach()


def lines(output: str) -> list[str]:
    """The console's lines, each after the time of the day."""
    return [line[10:] for line in output.splitlines() if re.match(r"\d\d:\d\d:\d\d  ", line)]


def numbers(pattern: str, line: str) -> list[float]:
    match = re.search(pattern, line)
    assert match is not None, line
    return [float(text.replace(",", "")) for text in match.groups()]


# -- lines in a log file -----------------------------------------------------------------------------------------------


def test_the_first_update_and_the_end_are_lines_of_their_own(tmp_path: Path, capsys: Any) -> None:
    losses: list[float] = []
    train(tmp_path, logs=lambda acc, update, loss: losses.append(loss.item()))
    first, last = lines(capsys.readouterr().err)
    assert f"  loss {losses[0]:.4g}  " in first and f"  loss {losses[-1]:.4g}  " in last
    assert re.match(r"epoch 1/2  step 1/6  loss -?[\d.]+  lr 0.125  memory [\d,.]+ [MG]iB$", first)
    assert re.match(r"epoch 2/2  step 6/6  loss -?[\d.]+  lr 0.125  \S+ updates/s  \S+ samples/s", last)
    assert last.endswith(" s in all")


def test_a_loss_that_is_older_than_its_line_stands_with_its_step(tmp_path: Path, capsys: Any) -> None:
    train(tmp_path, data=TensorDataset(torch.ones(900, 2)), until=300, counted=False)
    last = lines(capsys.readouterr().err)[-1]
    match = re.search(r"step 300  loss -?[\d.]+(?: of step (\d+))?  ", last)
    assert match is not None and int(match[1] or 300) <= 300
    assert last.startswith("epoch 1  step 300  ")
    updates, samples = numbers(r"([\d.,]+) updates/s  ([\d.,]+) samples/s", last)
    assert samples == pytest.approx(2 * updates, rel=0.01)


def test_an_interval_of_log_lines_can_be_chosen(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(console, "FIRST_INTERVAL", 1e-6)
    train(tmp_path, options={"every": 1e-6})
    printed_lines = lines(capsys.readouterr().err)
    assert [re.search(r"step (\d)/6", line)[1] for line in printed_lines] == list("1234566")  # type: ignore[index]
    assert "left" in printed_lines[2]
    assert "left" not in printed_lines[-1]
    train(tmp_path / "loop", options={"every": 1e-6}, counted=False)  # a loop of the script's own
    fifth = lines(capsys.readouterr().err)[4]
    assert fifth.startswith("epoch 2  step 5  ") and fifth.endswith("left of this epoch")


def test_logged_values_take_the_place_of_what_is_read_from_the_run(tmp_path: Path, capsys: Any) -> None:
    def logs(acc: Accelerator, update: int, loss: torch.Tensor) -> None:
        acc.log({"train/loss": update / 8, "lr": 0.5, "phase": "warm", "count": update})

    train(tmp_path, ["jsonl", "console"], logs=logs)
    last = lines(capsys.readouterr().err)[-1]
    assert "step 6/6  train/loss 0.75  lr 0.5  phase warm  count 6  " in last
    assert len(rows(tmp_path)) == 6  # beside it, every row is kept


def test_tokens_are_counted_where_backward_gets_their_number(tmp_path: Path, capsys: Any) -> None:
    train(tmp_path, items=50, accumulation=2)
    last = lines(capsys.readouterr().err)[-1]
    updates, tokens = numbers(r"([\d.,e+]+) updates/s  ([\d.,e+]+) tokens/s", last)
    assert tokens == pytest.approx(100 * updates, rel=0.02)  # two micro-batches of 50


def test_a_loader_without_length_and_a_resumed_run(tmp_path: Path, capsys: Any) -> None:
    train(tmp_path / "stream", data=Endless())
    printed_lines = lines(capsys.readouterr().err)
    assert printed_lines[0].startswith("epoch 1/2  step 1  ") and printed_lines[-1].startswith("epoch 2/2  step 12  ")
    train(tmp_path, until=4)
    capsys.readouterr()
    train(tmp_path)
    printed_lines = lines(capsys.readouterr().err)
    assert printed_lines[0].startswith("epoch 2/2  step 5/6") and printed_lines[-1].startswith("epoch 2/2  step 6/6")


def test_an_error_adds_no_line_and_a_closed_stream_ends_no_training(
    tmp_path: Path, capsys: Any, monkeypatch: Any, caplog: Any
) -> None:
    def fail(acc: Accelerator, update: int, loss: torch.Tensor) -> None:
        if update == 2:
            raise ValueError("of the script")

    with pytest.raises(ValueError, match="of the script"):
        train(tmp_path, logs=fail)
    assert len(lines(capsys.readouterr().err)) == 1
    stream = io.StringIO()
    stream.close()
    stream.isatty = lambda: False  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", stream)
    train(tmp_path)
    message = "tracker console: ValueError: I/O operation on closed file; the training goes on"
    assert [r.message for r in caplog.records if "console" in r.message] == [message]


def watched(folder: str) -> str:
    with redirect_stderr(io.StringIO()) as output:
        train(folder)
    return output.getvalue()


def test_of_several_processes_the_main_one_shows_the_line(tmp_path: Path, ranks: Any) -> None:
    main, other = ranks(watched, str(tmp_path))
    assert lines(main)[-1].startswith("epoch 2/2  step 6/6")
    assert not lines(other)


# -- the setting -------------------------------------------------------------------------------------------------------


def test_its_options_are_checked_and_its_package_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    with Accelerator(cpu=True, project_dir=tmp_path, log_with=["console", "jsonl"]) as acc:
        assert all(acc.get_tracker(name).name == name for name in ("jsonl", "console"))
    for options in ({"every": 0}, {"every": True}, {"eevry": 5}):
        with pytest.raises(SettingError, match="it takes `every`, seconds above 0"):
            train(tmp_path, options=options)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = r"console needs the package tqdm, .*pip install 'easymp\[console\]'"
    with pytest.raises(SettingError, match=message):
        Accelerator(cpu=True, log_with="console")


# -- the line on a terminal --------------------------------------------------------------------------------------------

SCRIPT = """
import logging, sys, time
import torch
from torch.utils.data import DataLoader
from easymp import Accelerator

logging.basicConfig(level=logging.WARNING, format="%(message)s")
for end in ("well", "fail"):
    acc = Accelerator(cpu=True, log_with="console", project_dir=sys.argv[1] + end)
    model = torch.nn.Linear(2, 1)
    data, optimizer = DataLoader(torch.ones(8, 2), 2), torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = acc.prepare(model, optimizer, data)
    for epoch in acc.epochs(2):
        for x in loader:
            acc.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.3)
        print("printed", epoch)
        logging.warning("logged %d", epoch)
        if end == "fail" and epoch == 1:
            raise ValueError("of the script")
    acc.end_training()
"""


def screen(text: str, columns: int = 200) -> list[str]:
    """The lines that a terminal shows after `text`."""
    rows, column = [""], 0
    text = text.replace("\r\x1b[K", "\r" + " " * columns + "\r")
    for letter in re.sub(r"\x1b\[\?25[lh]", "", text):
        if letter == "\n":
            rows.append("")
        elif letter == "\r":
            column = 0
        else:
            line = rows[-1].ljust(column)
            rows[-1] = line[:column] + letter + line[column + 1 :]
            column += 1
    return [line.rstrip() for line in rows if line.strip()]


@pytest.mark.slow
def test_on_a_terminal_one_line_is_updated_below_what_the_script_prints(tmp_path: Path) -> None:
    words = "an optional package is not installed: pexpect (of the extra 'test')"
    pexpect = pytest.importorskip("pexpect", reason=words)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHON_COLORS": "0"}  # in tracebacks, since Python 3.13
    options = {"dimensions": (24, 200), "timeout": 90, "encoding": "utf-8", "env": environment}
    process = pexpect.spawn(sys.executable, [str(script), f"{tmp_path}/"], **options)
    process.expect(pexpect.EOF)
    process.close()
    assert process.exitstatus == 1
    assert process.before.count("step ") > 8
    shown, printed = screen(process.before), ["printed 0", "logged 0", "printed 1", "logged 1"]
    assert shown[:4] == shown[5:9] == printed
    assert re.match(r"100%\|.*\| epoch 2/2  step 8/8  loss .* in all$", shown[4])
    assert shown[9].startswith("Traceback") and shown[-1] == "ValueError: of the script"


def test_a_narrow_terminal_keeps_the_line_within_its_width(tmp_path: Path, monkeypatch: Any) -> None:
    reader, writer = os.openpty()
    termios.tcsetwinsize(writer, (24, 40))
    with open(reader, encoding="utf-8") as output, open(writer, "w", encoding="utf-8") as err:
        monkeypatch.setattr(sys, "stderr", err)
        train(tmp_path)
        shown = screen(os.read(output.fileno(), 1 << 16).decode(), 40)
    assert re.match(r"100%\|.*\| epoch 2/2  step 6/6", shown[-1]) and max(map(len, shown)) <= 40


def test_the_streams_are_as_before_when_the_run_is_over(tmp_path: Path, monkeypatch: Any) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    handler = logging.StreamHandler(err)
    log = logging.getLogger("of the script")
    log.addHandler(handler)
    try:
        train(tmp_path, logs=lambda acc, update, loss: print(update) or log.error("said"))
        assert (sys.stdout, sys.stderr, handler.stream) == (out, err, err)
    finally:
        log.removeHandler(handler)
    assert out.getvalue() == "1\n2\n3\n4\n5\n6\n"
    assert err.getvalue().count("said\n") == 6
