"""The kernels under the address and undefined-behaviour sanitizers, over the same tests: no access beyond a tensor, none misaligned."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FLAGS = "-g1 -fsanitize=address,undefined -fno-sanitize-recover=all"
PARTS = [
    ["tests/cuda/test_table.py"],
    ["tests/optim/test_own.py", "-k", "strides or empty or rounded_stochastically"],
    ["tests/optim/test_formulas.py", "-k", "True"],
]

# One number too many, and a word of 16 bytes at an odd address.
WRONG = """
import torch
from easymp.cuda.kernel import Kernel
from tests.cuda.compiled import CompiledLauncher
kernel = Kernel("wrong", ("uint64 x",), "if (thread == 0) {{ {body} }}")
x = torch.zeros({size})
CompiledLauncher().launch(kernel, 1, [x.data_ptr()])
print("unseen")
"""


def start(*command):
    libraries = [
        subprocess.run(
            ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    given = {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:malloc_context_size=0:quarantine_size_mb=16",  # Python leaks; torch allocates without end
        "KERNEL_FLAGS": FLAGS,
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=HERE.parents[1],
        env={**os.environ, **given},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_same_tests_sanitized():
    running = [start("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *part) for part in PARTS]
    for process in running:
        said, _ = process.communicate()
        assert process.returncode == 0, said
        assert " passed" in said or "100%" in said, said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "size", "found"),
    [
        ("at<float>(x)[4] = 1.f;", 4, "heap-buffer-overflow"),
        ("at<uint4>(x + 4)->x = 1;", 16, "misaligned address"),
    ],
)
def test_the_sanitizers_see_what_they_are_for(body, size, found):
    process = start("-c", WRONG.format(body=body, size=size))
    said, _ = process.communicate()
    assert process.returncode != 0
    assert found in said
