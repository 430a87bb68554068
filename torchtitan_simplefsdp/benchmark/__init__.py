"""Benchmark: SimpleFSDP side by side with no communication at all, DDP, FSDP2 and torchtitan's own SimpleFSDP."""
