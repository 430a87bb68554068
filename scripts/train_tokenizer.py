"""Train a byte-level BPE tokenizer on the embedded text or on files of your own.

    python scripts/train_tokenizer.py --output outputs/tokenizer
    python scripts/train_tokenizer.py --dataset text --dataset_path my_texts/ --output outputs/tokenizer

Train with it: --model.hf_assets_path outputs/tokenizer
"""

import argparse

from torchtitan_simplefsdp.titan.corpus import get_pydoc_documents
from torchtitan_simplefsdp.titan.text_files import read_text_files
from torchtitan_simplefsdp.titan.tokenizer import train_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", choices=["pydoc", "text"], default="pydoc", help="default: pydoc")
    parser.add_argument("--dataset_path", help="for text: a file, a folder or a glob pattern")
    parser.add_argument("--vocab-size", type=int, default=2048, help="tokens, default: 2048")
    parser.add_argument("--output", required=True, help="folder for the two files of the tokenizer")
    args = parser.parse_args()
    if (args.dataset == "text") != (args.dataset_path is not None):
        parser.error("--dataset text and --dataset_path need each other")

    from_files = args.dataset == "text"
    documents = read_text_files(args.dataset_path) if from_files else get_pydoc_documents()
    try:
        trained_on = train_tokenizer(documents, args.vocab_size, args.output, args.dataset)
    except (ValueError, FileNotFoundError) as error:
        parser.exit(1, f"{error}\n")
    print(
        f"{args.output}: {args.vocab_size} tokens, from {trained_on['documents']} documents "
        f"({trained_on['bytes']} bytes) of '{args.dataset}'"
    )


if __name__ == "__main__":
    main()
