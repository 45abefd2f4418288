"""The kernels under the address and undefined-behaviour sanitizers, over the same tests.

No access beyond a tensor, none misaligned.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FLAGS = "-O0 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all"
# Each rule once, in fp32 at odd addresses or in bf16: other precisions have the same loops.
RULES = "rounded_stochastically and (AdamW or SGD) or agree and (Lion or Adagrad or larc-)"
TESTS = ["tests/cuda/test_table.py", "tests/optim/test_own.py", "-k", f"test_table or strides or empty or {RULES}"]

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
    environment = {
        "LD_PRELOAD": " ".join(library.stdout.strip() for library in libraries),
        # Python leaks; torch allocates without end
        "ASAN_OPTIONS": "detect_leaks=0:malloc_context_size=0:quarantine_size_mb=16",
        "KERNEL_FLAGS": FLAGS,
        "OMP_NUM_THREADS": "1",
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, *command], cwd=HERE.parents[1], env={**os.environ, **environment}, **pipes)


@pytest.mark.slow
def test_the_same_tests_sanitized():
    process = start("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert " passed" in output or "100%" in output, output


@pytest.mark.slow
def test_the_sanitizers_see_what_they_are_for():
    running = [start("-c", WRONG.format(body)) for body in FOUND]
    for process, message in zip(running, FOUND.values()):
        output, _ = process.communicate()
        assert process.returncode != 0
        assert message in output
