"""The kernels under the address and undefined-behaviour sanitizers, over the same tests: no access beyond a tensor, none misaligned."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FLAGS = "-O0 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all"
# Each rule once, in fp32 at odd addresses or in bf16: other precisions have the same loops.
RULES = (
    "rounded_stochastically and (AdamW or SGD or LAMB) or agree and (Lion or NovoGrad or Adagrad or larc-)"
)
TESTS = [
    "tests/cuda/test_table.py",
    "tests/optim/test_own.py",
    "-k",
    f"test_table or strides or empty or {RULES}",
]

WRONG = """
import torch
from easymp.cuda.kernel import Kernel
from tests.cuda.compiled import CompiledLauncher
kernel = Kernel("wrong", ("uint64 x",), "if (thread == 0) {{ {} }}")
x = torch.zeros(16)
CompiledLauncher().launch(kernel, 1, [x.data_ptr()])
print("unseen")
"""
FOUND = {  # one number too many, and a word of 16 bytes at an odd address
    "at<float>(x)[16] = 1.f;": "heap-buffer-overflow",
    "at<uint4>(x + 4)->x = 1;": "misaligned address",
}


def start(*command):
    libraries = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        for name in ("libasan.so", "libubsan.so")
    ]
    given = {
        "LD_PRELOAD": " ".join(found.stdout.strip() for found in libraries),
        "ASAN_OPTIONS": "detect_leaks=0:malloc_context_size=0:quarantine_size_mb=16",  # Python leaks; torch allocates without end
        "KERNEL_FLAGS": FLAGS,
        "OMP_NUM_THREADS": "1",
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(
        [sys.executable, *command], cwd=HERE.parents[1], env={**os.environ, **given}, **pipes
    )


@pytest.mark.slow
def test_the_same_tests_sanitized():
    process = start("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS)
    said, _ = process.communicate()
    assert process.returncode == 0, said
    assert " passed" in said or "100%" in said, said


@pytest.mark.slow
def test_the_sanitizers_see_what_they_are_for():
    running = [start("-c", WRONG.format(body)) for body in FOUND]
    for process, found in zip(running, FOUND.values()):
        said, _ = process.communicate()
        assert process.returncode != 0
        assert found in said
