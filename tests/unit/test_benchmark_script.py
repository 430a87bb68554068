"""scripts/benchmark.py: which sizes its flags give, and what it writes into docs/performance.md."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("benchmark", REPOSITORY / "scripts" / "benchmark.py")
benchmark = importlib.util.module_from_spec(spec)
spec.loader.exec_module(benchmark)


def test_a_flag_wins_over_the_preset_and_the_preset_over_nothing():
    args = benchmark.build_parser().parse_args(["--preset", "parameters", "--dim", "128", "--modes", "hybrid_shard"])
    options = benchmark.build_options(args)
    preset = benchmark.PRESETS["parameters"]
    assert (options.dim, options.layers, options.batch) == (128, preset["layers"], preset["batch"])
    assert (options.modes, options.ranks, options.dtype) == (("hybrid_shard",), 2, "fp32")


def test_a_result_replaces_its_section_alone_and_brings_its_picture(tmp_path, monkeypatch):
    document, picture = tmp_path / "performance.md", tmp_path / "plot.png"
    start, end = benchmark.get_start("two_ranks"), benchmark.END
    document.write_text(f"# title\n{start}Not measured yet.\n{end}\n## other\n{benchmark.get_start('b')}old\n{end}\n")
    picture.write_bytes(b"picture")
    monkeypatch.setattr(benchmark, "DOCUMENT", document)
    benchmark.write_docs("two_ranks", "python x", "2 ranks.\n\n| a |\n", picture)
    section = "```\npython x\n```\n\n2 ranks.\n\n| a |\n\n![two_ranks](performance/two_ranks.png)\n"
    assert document.read_text() == f"# title\n{start}{section}{end}\n## other\n{benchmark.get_start('b')}old\n{end}\n"
    assert (tmp_path / "performance" / "two_ranks.png").read_bytes() == b"picture"


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--ranks", "3", "--tp", "2"], "benchmark: tp=2 does not divide ranks=3."),
        (["--contenders", "fsdp3"], "benchmark: unknown contenders: fsdp3. Contenders: none, "),
        (["--write-docs", "nine_ranks"], "--write-docs nine_ranks: docs/performance.md has no line '<!-- benchmark: "),
    ],
)
def test_what_cannot_be_measured_or_written_is_refused_before_any_process_starts(flags, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["benchmark.py", *flags])
    monkeypatch.setattr("torchtitan_simplefsdp.benchmark.run.run_ranks", None)  # a call would be a TypeError
    with pytest.raises(SystemExit) as error:
        benchmark.main()
    assert error.value.code == 2 and message in capsys.readouterr().err


def test_the_document_has_sections_that_can_be_replaced():
    text = benchmark.DOCUMENT.read_text()
    for name in ("two_ranks", "four_ranks", "tensor_parallel", "memory"):
        assert benchmark.replace_section(text, benchmark.get_start(name), benchmark.END, "new\n") != text
