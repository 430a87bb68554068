"""Loss comparison: train several configurations and compare loss and gradient norm, step by step."""
