"""How well a model without any context does on a corpus: the number that a trained model has to beat.

    python examples/unigram_entropy.py data/corpus_text_document --split 90,10,0

prints, in nats per token, the unigram entropy of the corpus (the best that a fixed distribution over tokens can
reach), and the cross entropy of the held-out documents under the training documents' token frequencies (what
such a distribution really reaches there). `--split` means what it means in training.
"""

import argparse

import numpy as np

import megatron_dllm  # noqa: F401  (before anything imports megatron)
from megatron_dllm.data.text import open_corpus


def split_corpus(prefix: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of the training documents and of the validation documents."""
    corpus = open_corpus(prefix)
    shares = [float(share) for share in split.split(",")]
    documents = len(corpus.document_indices) - 1
    edges = [round(documents * sum(shares[:n]) / sum(shares)) for n in range(3)]
    sequences = corpus.document_indices[edges]
    read = lambda first, last: np.concatenate([corpus[i] for i in range(first, last)] or [np.zeros(0, int)])
    return read(sequences[0], sequences[1]), read(sequences[1], sequences[2])


def entropy(ids: np.ndarray) -> float:
    """Nats per token under the frequencies of `ids` themselves."""
    counts = np.bincount(ids)
    p = counts[counts > 0] / len(ids)
    return float(-(p * np.log(p)).sum())


def cross_entropy(ids: np.ndarray, reference: np.ndarray) -> float:
    """Nats per token of `ids` under the frequencies of `reference`, one added to every count."""
    counts = np.bincount(reference, minlength=int(max(ids.max(), reference.max())) + 1) + 1
    return float(-np.log(counts[ids] / counts.sum()).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prefix", help="path of a .bin/.idx corpus without the ending")
    parser.add_argument("--split", default="90,10,0", help="shares of training, validation and test documents")
    args = parser.parse_args()
    train, valid = split_corpus(args.prefix, args.split)
    print(f"unigram entropy of the corpus: {entropy(np.concatenate([train, valid])):.3f} nats per token")
    print(f"unigram cross entropy of the held-out documents: {cross_entropy(valid, train):.3f} nats per token")


if __name__ == "__main__":
    main()
