"""What there is to collect."""

from ..versions import ADDS

# Its Muon is in no torch 2.8, and refused for shards where they add wrongly; test_requirements has what the script
# says.
collect_ignore = [] if ADDS else ["test_char_gpt.py"]
