"""Core: SimpleFSDP for any nn.Module; imports torch and nothing else."""
