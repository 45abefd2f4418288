"""The same script under several plans, side by side: runs, their records, a verdict, and a page to send to a colleague.

Nothing here imports torch: the runs do, each in processes of its own.
"""

from .comparison import Comparison, compare
from .report import as_json, write_json, write_report
from .running import Task
from .summaries import Run, Summary
from .table import heads, rows
from .variants import Variant, variants
from .writing import seconds

__all__ = [
    "Comparison",
    "Run",
    "Summary",
    "Task",
    "Variant",
    "as_json",
    "compare",
    "heads",
    "rows",
    "seconds",
    "variants",
    "write_json",
    "write_report",
]
