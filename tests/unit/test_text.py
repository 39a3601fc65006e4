"""Packed text against a plain-python reference, and what `build_text` makes of Megatron's data flags."""

import json
import pickle
from argparse import Namespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dllm.data import text as text_module
from megatron_dllm.data.order import Blend, permutation
from megatron_dllm.data.text import PackedText, build_text, check_token_ids
from megatron_dllm.data.tokenizer import build_tokenizer

BYTES = build_tokenizer(Namespace(tokenizer_type="ByteLevelTokenizer"))


def write_corpus(path, documents, dtype=np.uint16):
    """`documents`: lists of ids, or lists of such lists where a document is stored as several sequences."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder  # after megatron_dllm

    builder = IndexedDatasetBuilder(f"{path}.bin", dtype=dtype)
    for document in documents:
        parts = document if document and isinstance(document[0], list) else [document]
        builder.add_document([i for part in parts for i in part], [len(part) for part in parts])
    builder.finalize(f"{path}.idx")
    return str(path)


def numbered(lengths):
    """Documents whose tokens are all different, so that a token names its document and place."""
    documents, at = [], 0
    for length in lengths:
        documents.append(list(range(at, at + length)))
        at += length
    return documents


def reference_epoch(documents, seq_length, seed, epoch, cross=False):
    """[(tokens, document, position)] of an epoch, in the order of training, by plain loops."""
    stream = []
    for d in permutation(seed, epoch, len(documents), "documents"):
        stream += [(token, d) for token in documents[d]]
    sequences = []
    for begin in range(0, len(stream) - seq_length + 1, seq_length):
        tokens, numbers, positions = [], [], []
        number, position, last = -1, 0, None
        for token, d in stream[begin : begin + seq_length]:
            if d != last:
                number, position, last = number + 1, 0, d
            tokens.append(token)
            numbers.append(number)
            positions.append(position)
            position += 1
        if cross:
            numbers, positions = [0] * seq_length, list(range(seq_length))
        sequences.append((tokens, numbers, positions))
    return [sequences[j] for j in permutation(seed, epoch, len(sequences), "sequences")]


def as_lists(sample):
    return sample.tokens_S.tolist(), sample.document_S.tolist(), sample.position_S.tolist()


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 25), min_size=1, max_size=12).filter(lambda lengths: sum(lengths) >= 16),
    seq_length=st.integers(1, 16),
    seed=st.integers(0, 100),
    cross=st.booleans(),
)
def test_three_epochs_agree_with_the_reference(tmp_path_factory, lengths, seq_length, seed, cross):
    documents = numbered(lengths)
    prefix = write_corpus(tmp_path_factory.mktemp("corpus") / "c", documents)
    text = PackedText(prefix, seq_length, seed, cross_document_attention=cross)
    assert len(text) == sum(lengths) // seq_length
    expected = [s for epoch in range(3) for s in reference_epoch(documents, seq_length, seed, epoch, cross)]
    assert [as_lists(text.sample(i)) for i in range(3 * len(text))] == expected
    for i in reversed(range(3 * len(text))):  # random access, in any order
        sample = text.sample(i)
        assert as_lists(sample) == expected[i] and sample.index == i
        assert sample.loss_mask_S.all()


def test_dtypes_and_stored_sentences(tmp_path):
    """A document may be several stored sequences: it is one document all the same."""
    for dtype in (np.uint16, np.int32):
        parts = write_corpus(tmp_path / "parts", [[[1, 2], [3]], [[4], [], [5, 6]]], dtype)
        whole = write_corpus(tmp_path / "whole", [[1, 2, 3], [4, 5, 6]], dtype)
        for i in range(6):
            one, other = PackedText(parts, 3, 5).sample(i), PackedText(whole, 3, 5).sample(i)
            assert as_lists(one) == as_lists(other)
        assert (one.tokens_S.dtype, one.position_S.dtype) == (torch.int64, torch.int64)
        assert (one.document_S.dtype, one.loss_mask_S.dtype) == (torch.int32, torch.bool)


def test_a_document_that_spans_sequences_restarts_at_position_0(tmp_path):
    text = PackedText(write_corpus(tmp_path / "c", numbered([10])), 4, seed=0)
    assert len(text) == 2  # 2 tokens are left over
    samples = sorted(as_lists(text.sample(i)) for i in range(2))
    assert samples == [([0, 1, 2, 3], [0] * 4, [0, 1, 2, 3]), ([4, 5, 6, 7], [0] * 4, [0, 1, 2, 3])]


def test_too_few_tokens_are_padded_not_supervised(tmp_path):
    prefix = write_corpus(tmp_path / "c", [[5, 6], [7]])
    for cross in (False, True):
        text = PackedText(prefix, 6, seed=1, cross_document_attention=cross, pad_id=9)
        assert len(text) == 1
        for i in range(4):
            sample = text.sample(i)
            assert sorted(sample.tokens_S[:3].tolist()) == [5, 6, 7]
            assert sample.tokens_S[3:].tolist() == [9, 9, 9]
            assert sample.loss_mask_S.tolist() == [True] * 3 + [False] * 3
            assert sample.document_S[3:].tolist() == [-1] * 3
            assert sample.document_S[:3].max() == (0 if cross else 1)


def test_an_epoch_reads_every_sequence_once_and_mixes_documents(tmp_path):
    documents = numbered([400] * 8)
    text = PackedText(write_corpus(tmp_path / "c", documents), 40, seed=3)
    for epoch in range(2):
        read = [int(text.sample(epoch * 80 + i).tokens_S[0]) // 400 for i in range(80)]
        assert sorted(read) == sorted(list(range(8)) * 10)
        assert sum(a == b for a, b in zip(read, read[1:], strict=False)) < 30  # one document: about 1 in 8
    first = [as_lists(text.sample(i)) for i in range(80)]
    assert first != [as_lists(text.sample(80 + i)) for i in range(80)]


def test_workers_and_pickles_read_the_same(tmp_path):
    text = PackedText(write_corpus(tmp_path / "c", numbered([30] * 10)), 8, seed=3, documents=range(2, 9))
    here = [as_lists(text.sample(i)) for i in range(60)]
    stored = pickle.dumps(text)
    assert len(stored) < 1000
    assert [as_lists(pickle.loads(stored).sample(i)) for i in range(60)] == here

    class Indexed(torch.utils.data.Dataset):
        def __len__(self):
            return 60

        def __getitem__(self, i):
            return text.sample(i).tokens_S

    loader = torch.utils.data.DataLoader(Indexed(), batch_size=6, num_workers=2)
    assert torch.cat(list(loader)).tolist() == [tokens for tokens, _, _ in here]


def arguments(**more):
    return Namespace(**{"seq_length": 4, "seed": 7, "split": None, **more})


def small_ids(prefix_path, count):
    """Documents d of 4 tokens each, all of value d: needs few ids."""
    return write_corpus(prefix_path, [[d] * 4 for d in range(count)])


def read(data, epochs=1):
    return [int(data.sample(i).tokens_S[0]) for i in range(epochs * len(data))]


def test_split_by_documents_as_megatron(tmp_path):
    prefix = small_ids(tmp_path / "c", 200)
    train, valid, test = build_text(arguments(data_path=[prefix]), BYTES)
    assert train.documents == range(0, 194) and valid.documents == range(194, 200) and test is None
    assert sorted(read(train)) == list(range(194)) and sorted(read(valid)) == list(range(194, 200))
    train, valid, test = build_text(arguments(data_path=[prefix], split="80,10,10"), BYTES)
    assert [s.documents for s in (train, valid, test)] == [range(160), range(160, 180), range(180, 200)]
    assert build_text(arguments(data_path=[prefix], split="100,0,0"), BYTES)[1:] == (None, None)
    assert build_text(arguments(data_path=[prefix], split="0,100,0"), BYTES)[0] is None


def test_only_the_training_order_depends_on_the_seed(tmp_path):
    prefix = small_ids(tmp_path / "c", 200)
    one = build_text(arguments(data_path=[prefix], split="50,25,25"), BYTES)
    other = build_text(arguments(data_path=[prefix], split="50,25,25", seed=8), BYTES)
    assert read(one[0]) != read(other[0]) and sorted(read(one[0])) == sorted(read(other[0]))
    assert read(one[1]) == read(other[1]) and read(one[2]) == read(other[2])


def test_how_long_the_run_is_does_not_reach_the_order(tmp_path):
    prefix = small_ids(tmp_path / "c", 50)
    runs = [
        dict(train_iters=10, global_batch_size=2, micro_batch_size=1, train_samples=None),
        dict(train_iters=9999, global_batch_size=64, micro_batch_size=4, train_samples=5),
    ]
    first, second = (build_text(arguments(data_path=[prefix], **run), BYTES)[0] for run in runs)
    assert read(first, epochs=4) == read(second, epochs=4)


def test_blends(tmp_path):
    a, b = small_ids(tmp_path / "a", 10), small_ids(tmp_path / "b", 30)
    blend = build_text(arguments(data_path=["0.75", a, "0.25", b], split="1,0,0"), BYTES)[0]
    assert isinstance(blend, Blend)
    owners = [blend.locate(i)[0] for i in range(8)]
    assert owners.count(0) == 6 and blend.sample(5).index == 5
    by_size = build_text(arguments(data_path=[a, b], split="1,0,0"), BYTES)[0]
    assert len(by_size) == 40 and sorted(read(by_size)) == sorted([*range(10), *range(30)])
    assert isinstance(pickle.loads(pickle.dumps(blend)), Blend)


def test_a_blend_member_too_small_for_a_split_is_named(tmp_path, caplog):
    a, b = small_ids(tmp_path / "a", 3), small_ids(tmp_path / "b", 100)
    _, valid, _ = build_text(arguments(data_path=["1", a, "1", b], split="90,10,0"), BYTES)
    assert valid.prefix == b
    assert f"{a} has no documents for the validation split" in caplog.text


def test_paths_per_split(tmp_path):
    a, b = small_ids(tmp_path / "a", 10), small_ids(tmp_path / "b", 6)
    train, valid, test = build_text(arguments(train_data_path=[a], valid_data_path=[b]), BYTES)
    assert sorted(read(train)) == list(range(10)) and sorted(read(valid)) == list(range(6)) and test is None

    (tmp_path / "whole.txt").write_text(f"0.5 {a}\n0.5 {b}\n")
    blend = build_text(arguments(data_args_path=str(tmp_path / "whole.txt"), split="1,0,0"), BYTES)[0]
    assert isinstance(blend, Blend)
    (tmp_path / "split.json").write_text(json.dumps({"train": [a], "valid": b}))
    train, valid, test = build_text(arguments(per_split_data_args_path=str(tmp_path / "split.json")), BYTES)
    assert (train.prefix, valid.prefix, test) == (a, b, None)


def test_flags_reach_the_sequences(tmp_path):
    prefix = write_corpus(tmp_path / "c", [[1, 2], [3]])
    flags = arguments(data_path=[prefix], split="1,0,0", dllm_cross_document_attention=True)
    flags.dllm_sequence_length, flags.seq_length = 5, 10  # as validated flags of a mode with two streams
    sample = build_text(flags, BYTES)[0].sample(0)
    assert sample.document_S.tolist() == [0, 0, 0, -1, -1]
    assert sample.tokens_S[3:].tolist() == [256, 256]  # the tokenizer's <pad>


def test_token_ids_outside_the_vocabulary(tmp_path, monkeypatch):
    prefix = write_corpus(tmp_path / "c", [[1, 2], [300, 4]])
    with pytest.raises(ValueError, match="c holds token id 300, but the tokenizer has 259 ids"):
        build_text(arguments(data_path=[prefix]), BYTES)
    negative = write_corpus(tmp_path / "n", [[1, -2]], np.int32)
    with pytest.raises(ValueError, match="token id -2"):
        check_token_ids(negative, 259)
    check_token_ids(prefix, 301)
    large = write_corpus(tmp_path / "l", [[7] * 1000, [8] * 1000])
    monkeypatch.setattr(text_module, "_SCANNED_WHOLE", 500)
    monkeypatch.setattr(text_module, "_CHUNK", 10)
    check_token_ids(large, 9)
    with pytest.raises(ValueError, match="token id 8"):
        check_token_ids(large, 8)


def test_mask_tokens_in_clean_text(tmp_path):
    prefix = write_corpus(tmp_path / "c", [[1, 2], [258, 4]])
    build_text(arguments(data_path=[prefix], dllm_mask_token_id=None), BYTES)
    with pytest.raises(ValueError, match="c holds the mask token 258"):
        build_text(arguments(data_path=[prefix], dllm_mask_token_id=258), BYTES)


def test_errors_name_the_file(tmp_path):
    prefix = small_ids(tmp_path / "c", 4)
    with pytest.raises(ValueError, match=r"nowhere\.bin does not exist"):
        build_text(arguments(data_path=[str(tmp_path / "nowhere")]), BYTES)
    with pytest.raises(ValueError, match=r"c\.bin\.bin does not exist; give a prefix"):
        build_text(arguments(data_path=[prefix + ".bin"]), BYTES)
    (tmp_path / "half.bin").write_bytes(b"xx")
    with pytest.raises(ValueError, match=r"half\.idx does not exist"):
        PackedText(str(tmp_path / "half"), 4, 0)
    (tmp_path / "half.idx").write_bytes(b"no index")
    with pytest.raises(ValueError, match=r"half\.idx is not a readable"):
        PackedText(str(tmp_path / "half"), 4, 0)
    (tmp_path / "half.idx").write_bytes(b"")
    with pytest.raises(ValueError, match=r"half\.idx is empty"):
        PackedText(str(tmp_path / "half"), 4, 0)
    with open(prefix + ".bin", "ab") as file:
        file.write(b"more")
    with pytest.raises(ValueError, match=r"c\.bin is not the 32 bytes"):
        PackedText(prefix, 4, 0)


def test_errors_of_the_flags(tmp_path):
    prefix = small_ids(tmp_path / "c", 4)
    cases = [
        (arguments(), "none of them"),
        (arguments(data_path=[prefix], train_data_path=[prefix]), "exactly one"),
        (arguments(data_path=[prefix], split="a,b"), "--split a,b"),
        (arguments(data_path=[prefix], split="1,1,1,1"), "--split 1,1,1,1"),
        (arguments(data_path=[prefix], split="0,0,0"), "--split 0,0,0"),
        (arguments(data_path=[prefix, prefix, "0.3", prefix]), "a weight for some only"),
        (arguments(data_path=[prefix], split="1,99,0"), "holds no tokens in documents 0 to 0"),
        (arguments(data_path=[prefix], seq_length=0), "--seq-length"),
        (arguments(data_args_path=str(tmp_path / "no.txt")), "Cannot read"),
    ]
    for flags, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            build_text(flags, BYTES)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="has 4 documents"):
        PackedText(prefix, 4, 0, documents=range(2, 9))
