"""One run: prepared models, its window of micro-batches, memory and collectives."""
