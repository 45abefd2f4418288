"""Make the pictures of README.md and the site: ``python docs/images/make.py [NAME…]``, or ``make pictures``.

- plan.svg: the plan that examples/digits.py prints
- profile.svg: the profile that examples/char_gpt.py prints on two processes
- rehearse.svg, prove.svg, replay.svg: a command of docs/guides/rehearsing.md, proving.md and replaying.md

It needs rich and the extra ``examples``.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LARGEST = 150_000  # bytes of a picture


def run(command: str, folder: str) -> str:
    """What a command prints on stdout."""
    print(f"$ {command}", flush=True)
    words = shlex.split(command)
    here = {"python": [sys.executable], "easymp": [sys.executable, "-m", "easymp"]}
    words = [*here.get(words[0], words[:1]), *words[1:]]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def terminal(command: str, printed: str, name: str) -> None:
    """Draw a terminal with the command and its output."""
    from rich.console import Console
    from rich.text import Text

    lines = [f"$ {command}", *printed.rstrip().splitlines()]
    console = Console(record=True, width=max(map(len, lines)) + 1, file=io.StringIO())
    console.print(Text(lines[0], style="bold green"))
    for line in lines[1:]:
        text = Text(line)
        text.highlight_regex(r"^[a-z]+(?= {2,})", "cyan")
        console.print(text)
    picture = console.export_svg(title="", unique_id=name)
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)  # no fonts from the network
    (HERE / f"{name}.svg").write_text(picture, encoding="utf-8")


def plan(folder: str) -> None:
    command = "python examples/digits.py"
    lines = run(command, folder).splitlines()
    end = next(i for i, line in enumerate(lines) if line.startswith("batch"))  # the plan's last line
    terminal(command, "\n".join(lines[: end + 1]), "plan")


def profile(folder: str) -> None:
    command = "python examples/char_gpt.py --profile --precision fp32 --processes 2 --steps 8"
    printed = run(command, folder)
    begin = printed.index("profile of rank")
    end = printed.index("\nprecision ", begin)
    terminal(command, printed[begin:end], "profile")


def of_guide(folder: str, page: str, command: str, before: str = "") -> None:
    """Draw a command of a guide, which runs beside the files that the guide shows."""
    text = (ROOT / f"docs/guides/{page}.md").read_text(encoding="utf-8")
    for name, content in re.findall(r'```python title="([^"]+)"\n(.*?)```', text, re.DOTALL):
        (Path(folder) / name).write_text(content, encoding="utf-8")
    if before:
        run(f"sh -c '{before} || true'", folder)
    printed = run(command, folder).replace(f"{folder}/", "").splitlines()
    terminal(
        command,
        "\n".join(textwrap.fill(line, 110) if len(line) > 110 else line for line in printed),
        command.split()[1],
    )


def rehearse(folder: str) -> None:
    command = "easymp rehearse train.py --processes 64 --for 8xH100 --strategy fsdp --global-batch 512"
    of_guide(folder, "rehearsing", command)


def prove(folder: str) -> None:
    command = "easymp prove train.py --strategy ddp --processes 2 --precision fp32 --steps 2 -- --sync"
    of_guide(folder, "proving", command)


def replay(folder: str) -> None:
    command = "easymp replay run --step 60 --nonfinite --hooks look.py"
    of_guide(folder, "replaying", command, f"{sys.executable} train.py")


PICTURES = {
    "plan": plan,
    "profile": profile,
    "rehearse": rehearse,
    "prove": prove,
    "replay": replay,
}


def main() -> None:
    for name in sys.argv[1:] or PICTURES:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "examples").symlink_to(ROOT / "examples")
            PICTURES[name](folder)
    for file in sorted(HERE.glob("*.*g")):
        print(f"{file.relative_to(ROOT)}: {file.stat().st_size:,} bytes")
        if file.stat().st_size > LARGEST:
            sys.exit(f"{file.name} is larger than {LARGEST:,} bytes")


if __name__ == "__main__":
    main()
