"""The shipped tokenizer and the script that trains one. Oracles: the text itself, and a second training."""

import hashlib
import json
import random
import runpy
import sys
from pathlib import Path

import pytest
from torchtitan.components.tokenizer import build_hf_tokenizer
from torchtitan.config import JobConfig

import torchtitan_simplefsdp
from torchtitan_simplefsdp.titan.corpus import get_pydoc_documents
from torchtitan_simplefsdp.titan.tokenizer import train_tokenizer

SHIPPED = Path(torchtitan_simplefsdp.__file__).parent / "assets" / "tokenizer"
SCRIPT = Path(__file__).parents[2] / "scripts" / "train_tokenizer.py"
FILES = ("tokenizer.json", "tokenizer_config.json")
TEXTS = ["", " ", "a", "Hello, world!\n", "naïve 漢字 😀 \u202e\x00\t\r\n", "  indented\n\n\n    code()  # 12345"]


def load(folder):
    config = JobConfig()
    config.model.hf_assets_path = str(folder)
    return build_hf_tokenizer(config)


def run_script(*argv):
    """Run the script as the command line would, in this process."""
    saved, sys.argv = sys.argv, [str(SCRIPT), *map(str, argv)]
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        sys.argv = saved


@pytest.fixture(scope="module")
def shipped():
    return load(SHIPPED)


def test_the_shipped_tokenizer_has_2048_tokens_and_is_small(shipped):
    assert shipped.get_vocab_size() == 2048
    assert sorted(shipped.get_vocab().values()) == list(range(2048))
    assert (SHIPPED / "tokenizer.json").stat().st_size < 150_000


@pytest.mark.parametrize("text", TEXTS)
def test_bos_and_eos_are_added_once_each_and_only_when_asked_for(text, shipped):
    bos, eos = shipped.bos_id, shipped.eos_id
    plain = shipped.encode(text, add_bos=False, add_eos=False)
    assert bos is not None and eos is not None and bos != eos
    assert bos not in plain and eos not in plain
    assert shipped.encode(text, add_bos=True, add_eos=True) == [bos, *plain, eos]
    assert shipped.encode(text) == [bos, *plain]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_a_round_trip(text, shipped):
    assert shipped.decode(shipped.encode(text, add_bos=True, add_eos=True)) == text


def test_random_unicode_survives_a_round_trip(shipped):
    random_ = random.Random(0)
    characters = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000]
    for _ in range(20):
        text = "".join(random_.choices(characters, k=200))
        assert shipped.decode(shipped.encode(text)) == text


def test_a_special_token_spelled_out_becomes_that_token(shipped):
    assert shipped.encode("a<|end_of_text|>", add_bos=False)[-1] == shipped.eos_id


def test_the_embedded_text_takes_fewer_than_a_token_per_3_bytes(shipped):
    documents = get_pydoc_documents()
    tokens = sum(len(shipped.encode(document, add_bos=False)) for document in documents)
    assert sum(len(document.encode()) for document in documents) / tokens > 3


def test_training_again_gives_the_shipped_files(tmp_path):
    trained_on = json.loads((SHIPPED / "tokenizer_config.json").read_text())["trained_on"]
    text = "".join(get_pydoc_documents())
    if hashlib.sha256(text.encode()).hexdigest() != trained_on["sha256"]:
        pytest.skip("the shipped tokenizer was trained on the topics of another Python release")
    run_script("--output", tmp_path)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (SHIPPED / name).read_bytes()


def test_training_twice_gives_identical_files(tmp_path):
    documents = get_pydoc_documents()[:40]
    for folder in ("a", "b"):
        train_tokenizer(iter(documents), 400, str(tmp_path / folder), "pydoc")
    for name in FILES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert load(tmp_path / "a").get_vocab_size() == 400


def test_the_script_trains_on_files_of_the_user(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("the cat sat on the mat\n" * 10)
    (tmp_path / "b.jsonl").write_text('{"text": "the dog"}\n')
    run_script("--dataset", "text", "--dataset_path", tmp_path, "--vocab-size", 262, "--output", tmp_path / "out")
    assert "262 tokens, from 2 documents (237 bytes) of 'text'" in capsys.readouterr().out
    tokenizer = load(tmp_path / "out")
    assert tokenizer.get_vocab_size() == 262
    assert tokenizer.decode(tokenizer.encode("the bird")) == "the bird"


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--dataset", "text"], "--dataset text and --dataset_path need each other"),
        (["--dataset_path", "x"], "--dataset text and --dataset_path need each other"),
        (["--dataset", "text", "--dataset_path", "no/such"], "'no/such' not found"),
        (["--vocab-size", 257], "vocab_size=257 is below 258"),
        (["--vocab-size", 1_000_000], "fewer than vocab_size=1000000. Choose at most"),
    ],
)
def test_the_script_refuses_what_it_cannot_do_and_writes_nothing(argv, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        run_script(*argv, "--output", tmp_path / "out")
    assert caught.value.code != 0
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
