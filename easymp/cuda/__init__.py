"""Kernels of our own, for what no compiler fuses: the step after backward.

From its text (`preamble`, `streams`, `rules`) a `Kernel` is compiled by a `Launcher`; `table` says where tensors lie; `step` runs it all.
"""
