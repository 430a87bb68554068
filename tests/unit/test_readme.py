"""The README's tree is generated, and the files that it and the docs name exist."""

import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_the_tree_is_what_the_script_writes():
    command = [sys.executable, str(REPOSITORY / "scripts" / "update_readme_tree.py"), "--check"]
    assert subprocess.run(command, capture_output=True, text=True).stderr == ""


def test_every_file_named_in_the_readme_exists():
    named = re.findall(r"`((?:tests|scripts|train_configs|core|titan)/[\w/]+\.\w+)`", (REPOSITORY / "README.md").read_text())
    assert len(named) > 10
    for name in named:
        assert (REPOSITORY / name).exists() or (REPOSITORY / "torchtitan_simplefsdp" / name).exists(), name
