"""scripts/benchmark.py from its command line to its files, on a model that is nearly nothing but parameters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_a_short_benchmark_prints_its_table_and_writes_json_and_picture(tmp_path):
    command = [sys.executable, str(REPOSITORY / "scripts" / "benchmark.py"), "--output", str(tmp_path), "--rounds", "3"]
    command += ["--dim", "256", "--layers", "12", "--vocab", "256", "--seq-len", "8", "--batch", "1", "--warmup", "1"]
    command += ["--modes", "fully_shard", "--contenders", "none", "fsdp2"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    rows = [line for line in result.stdout.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[:2] for row in rows[2:]] == [["| none", "any"], ["| fsdp2", "fully_shard"]]
    none, fsdp2 = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert (none["error"], fsdp2["error"]) == (None, None)
    assert len(fsdp2["seconds"]) == 3 and min(fsdp2["seconds"]) > 0
    assert fsdp2["loss"] == none["loss"]  # nothing of the forward depends on where the parameters are
    assert fsdp2["memory_bytes"] < 0.8 * none["memory_bytes"]  # half of the states, and what is gathered
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
