"""Checkpoints: sharded safetensors and JSON, committed at once, verified, read by any number of ranks. No pickle."""
