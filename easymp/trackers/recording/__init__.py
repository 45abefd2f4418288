"""What a run writes down of itself where ``EASYMP_RECORD`` names a folder: `easymp compare` reads it.

The folder gets a file a rank, ``rank-0.jsonl`` …, of lines that are JSON objects. Each has `event` and `at`, seconds since the
Accelerator was made:

- ``begin``: `time` (seconds since 1970), `rank`, `ranks`, `plan`, `machine`, and `memory`: "device" where bytes are those allocated on
  it, "process" where they are resident in this process and its children
- ``memory``: `bytes` now, and `updates` and `samples` so far; several a second
- ``first``: the end of the first optimizer update, with `updates` and `samples`
- ``log``: numbers that the script logged, as `values`, with its `step`, and `updates` made by then; of rank 0 only
- ``end``: `plan`, `updates`, `samples`, `peak` bytes, `last` (when the last update ended), and `seconds` from the end of the first
  update to that of the last, on an accelerator by its own clock

Samples are those of all ranks, None where nobody knows; numbers that are not finite are the words "nan", "inf" and "-inf". A run
that is killed has no end, and one that makes several Accelerators several beginnings.
"""

from .recorder import Recorder, begin

__all__ = ["Recorder", "begin"]
