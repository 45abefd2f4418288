"""The facts of a machine, as frozen records, sizes in bytes: probes fill them, and decisions read only these."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CPU:
    """The processor, as this process may use it."""

    name: str
    architecture: str  # "x86_64", "aarch64", "arm64"
    cores: int  # physical cores of the machine
    threads: int  # logical processors this process may run on: affinity and cgroup quota counted in
    numa_nodes: int
    memory: int  # the smaller of the machine's and the cgroup's limit
    features: frozenset[str] = frozenset()  # "avx2", "avx512_bf16", "avx512_fp16", "amx_bf16", "sve_bf16" …

    @property
    def bf16(self) -> bool:
        """Whether there are instructions for bf16 products, not only conversions."""
        return bool(self.features & {"avx512_bf16", "amx_bf16", "sve_bf16", "neon_bf16"})

    @property
    def fp16(self) -> bool:
        """Whether there are instructions for fp16 arithmetic that make it worth running."""
        return bool(self.features & {"avx512_fp16", "amx_fp16"})


@dataclass(frozen=True)
class Device:
    """One accelerator."""

    kind: str  # torch's device type: "cuda" (NVIDIA and AMD), "xpu", "mps"
    index: int
    name: str
    memory: int
    capability: tuple[int, int] | None = None  # NVIDIA only
    architecture: str | None = None  # "sm_80", "gfx942" …
    tensor_cores: frozenset[str] = frozenset()  # of "fp16", "bf16", "tf32", "fp8"
    bf16: bool = False  # native, not emulated
    fp16: bool = False  # faster than fp32
    built_for: bool = True  # whether this torch has code for the architecture

    @property
    def tf32(self) -> bool:
        return "tf32" in self.tensor_cores

    @property
    def fp8(self) -> bool:
        return "fp8" in self.tensor_cores


@dataclass(frozen=True)
class Hardware:
    """One machine.

    Attributes:
        cpu: the processor.
        devices: the visible accelerators, all of one kind.
        vendor: of the accelerators: "nvidia", "amd", "intel", "apple" or "none".
        looked_for: a sentence for each kind of hardware that was not found.

    Example:
        >>> detect(use_accelerators=False).kind
        'cpu'
    """

    cpu: CPU
    devices: tuple[Device, ...] = ()
    vendor: str = "none"
    looked_for: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """torch's device type of the accelerators here, or ``"cpu"``."""
        return self.devices[0].kind if self.devices else "cpu"
