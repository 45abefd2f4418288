"""A CUDA driver that is not there: under CuPy's real calls and real compilations, launches go to kernels compiled by g++.

CuPy's modules find the driver's functions in the capsules of `cupy_backends`, when they are imported; so this goes in before them.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import contextmanager
from typing import Any

from easymp.cuda import cupy_launcher
from easymp.cuda.kernel import THREADS, Kernel

from .compiled import CTYPES, compiled, source

STREAM = 0x5EED
_CAPABILITY = {75: 9, 76: 0}  # cudaDevAttrComputeCapabilityMajor and Minor: sm_90
_int, _size, _object = ctypes.c_int, ctypes.c_ssize_t, ctypes.py_object


class Driver:
    """Records what CuPy asks for; `launches` are names, with the blocks, and 0 blocks for a start of one thread."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, int]] = []
        self.wrong: list[str] = []
        self.guarded = 0
        self._making: Kernel | None = None
        self._functions: dict[int, Kernel] = {}
        self._keep: list[Any] = []

    def install(self) -> None:
        assert "cupy" not in sys.modules
        import cupy_backends.cuda.api.driver as driver
        import cupy_backends.cuda.api.runtime as runtime

        last = _int  # of each: whether Cython may look for an override
        self._put(runtime, "getDevice", lambda skip: 0, _int, last)
        self._put(runtime, "setDevice", lambda device, skip: None, _object, _int, last)
        self._put(
            runtime,
            "deviceGetAttribute",
            lambda what, device, skip: _CAPABILITY.get(what, 0),
            _int,
            _int,
            _int,
            last,
        )
        self._put(runtime, "_ensure_context", lambda: None, _object)
        self._put(driver, "moduleLoadData", lambda image, skip: 1, _size, _object, last)
        self._put(driver, "moduleUnload", lambda module, skip: None, _object, _size, last)
        self._put(driver, "moduleGetFunction", self._function, _size, _size, _object, last)
        self._put(
            driver, "launchKernel", self._launch, _object, _size, *[ctypes.c_uint] * 7, *[_size] * 3, last
        )

    @contextmanager
    def here(self) -> Any:
        """`launching` on this device."""
        make, stream, guard = (
            cupy_launcher.elementwise,
            cupy_launcher.current_stream,
            cupy_launcher.torch.cuda.device,
        )

        def elementwise(kernel: Kernel) -> Any:
            self._making = kernel
            return make(kernel)

        @contextmanager
        def guarded(index: Any) -> Any:
            self.guarded += 1
            yield

        cupy_launcher.elementwise, cupy_launcher.current_stream, cupy_launcher.torch.cuda.device = (
            elementwise,
            lambda index: STREAM,
            guarded,
        )
        try:
            yield
        finally:
            cupy_launcher.elementwise, cupy_launcher.current_stream, cupy_launcher.torch.cuda.device = (
                make,
                stream,
                guard,
            )

    def _put(self, module: Any, name: str, function: Any, result: Any, *kinds: Any) -> None:
        api = ctypes.pythonapi
        api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [_object]
        api.PyCapsule_New.restype, api.PyCapsule_New.argtypes = (
            _object,
            [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
        )
        capsule = module.__pyx_capi__[name]
        signature = api.PyCapsule_GetName(capsule)
        called = ctypes.PYFUNCTYPE(result, *kinds)(function)
        self._keep += [capsule, signature, called]
        module.__pyx_capi__[name] = api.PyCapsule_New(ctypes.cast(called, ctypes.c_void_p), signature, None)

    def _function(self, module: int, name: str, skip: int) -> int:
        number = len(self._functions) + 1
        assert self._making is not None
        self._functions[number] = self._making
        return number

    def _launch(self, function: int, *numbers: int) -> None:
        grid, block, (shared, stream, given, _, _) = numbers[:3], numbers[3:6], numbers[6:]
        kernel = self._functions[function]
        dry = block == (1, 1, 1)
        if (
            (shared, stream) != (0, STREAM)
            or grid[1:] != (1, 1)
            or block not in ((1, 1, 1), (THREADS, 1, 1))
            or (dry and grid[0] != 1)
        ):
            self.wrong.append(f"{kernel.name}: grid {grid}, block {block}, shared {shared}, stream {stream}")
        self.launches.append((kernel.name, 0 if dry else grid[0]))
        if not dry:
            places = (ctypes.c_void_p * len(kernel.arguments)).from_address(given)
            kinds = [CTYPES[a.split()[0]] for a in kernel.arguments]
            values = [kind.from_address(place).value for kind, place in zip(kinds, places)]
            compiled(source(kernel), kernel.arguments, ())(grid[0], *values)
