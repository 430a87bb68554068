"""Write the README's file tree: each file with the first line of its docstring or header comment.

    python scripts/update_readme_tree.py [--check]

--check changes nothing and exits with 1 when the tree in the README is not what it would write.
"""

import argparse
import ast
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # this checkout's package

from torchtitan_simplefsdp.document import replace_section  # noqa: E402

START, END = "<!-- tree: python scripts/update_readme_tree.py -->\n```\n", "```\n<!-- end of tree -->"

# Folders are listed with the phrase here, or for a package that of its __init__.py; files inside only where it is None.
FOLDERS = {
    "torchtitan_simplefsdp": None,
    "torchtitan_simplefsdp/core": None,
    "torchtitan_simplefsdp/graph": None,
    "torchtitan_simplefsdp/titan": None,
    "torchtitan_simplefsdp/titan/config": None,
    "torchtitan_simplefsdp/compare": None,
    "torchtitan_simplefsdp/benchmark": None,
    "torchtitan_simplefsdp/assets": "tokenizer of 2048 tokens, trained by scripts/train_tokenizer.py",
    "train_configs": None,
    "scripts": None,
    "docs": None,
    "docs/numerics": "pictures of docs/numerics.md",
    "docs/performance": "pictures of docs/performance.md",
    "docs/scaling": "picture of docs/scaling.md",
    "tests": "what is tested, by how many processes it takes",
    "tests/unit": "one process, fake process groups of any size",
    "tests/distributed": "2, 4 and 8 gloo ranks against one process and FSDP2",
    "tests/integration": "real ./run_train.sh runs",
}
FILES = ["run_train.sh", "run_tests.sh", "pyproject.toml", "constraints.txt", ".ci/run"]


def get_first_line(file: Path) -> str:
    """Return the first line of a module's docstring, or of a shell or TOML file's header comment."""
    text = file.read_text()
    if file.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    comments = (line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    return next((line for line in comments if line and not line.startswith("!")), "package metadata and dependencies")


def build_tree() -> str:
    lines = [(name, get_first_line(REPOSITORY / name)) for name in FILES]
    for folder, phrase in FOLDERS.items():
        path, depth = REPOSITORY / folder, folder.count("/")
        init = path / "__init__.py"
        lines.append(("  " * depth + path.name + "/", phrase or (get_first_line(init) if init.exists() else "")))
        if phrase is None:
            files = sorted(file for file in path.iterdir() if file.suffix in (".py", ".sh", ".toml", ".md"))
            files = [file for file in files if file.name != "__init__.py"]
            lines += [("  " * (depth + 1) + file.name, get_first_line(file)) for file in files]
    width = max(len(name) for name, _ in lines)
    return "".join(f"{name:<{width}}  {phrase}".rstrip() + "\n" for name, phrase in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args().check
    readme = REPOSITORY / "README.md"
    text = replace_section(readme.read_text(), START, END, build_tree())
    if check and text != readme.read_text():
        print("README.md: the file tree is out of date. Run python scripts/update_readme_tree.py.", file=sys.stderr)
        return 1
    if not check:
        readme.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
