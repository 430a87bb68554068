"""Graph: what a step does, op by op, and what it costs on a machine; imports torch and core/compat.py."""
