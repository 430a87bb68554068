"""Adapter to torchtitan, the only folder (beside train.py) that imports it."""
