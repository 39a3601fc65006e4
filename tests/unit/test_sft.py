"""Chat data sets: files, order, truncation, splits, and what the padding policies make of a sample."""

import json
import multiprocessing
import pickle
from argparse import Namespace
from dataclasses import fields

import pyarrow
import pyarrow.parquet
import pytest
import torch

from megatron_dllm.data import chat_files
from megatron_dllm.data.chat import render
from megatron_dllm.data.collation import pad_sample
from megatron_dllm.data.sample import PADDING_DOCUMENT
from megatron_dllm.data.sft import ChatDataset, build_chat, split_items
from megatron_dllm.data.tokenizer import ByteLevel

TOKENIZER = ByteLevel()
EOS, PAD = TOKENIZER.eos_id, TOKENIZER.pad_id


def talk(answer, question="?"):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


TALKS = [talk(f"answer {i}" + "!" * (i % 5)) for i in range(23)]


def write_jsonl(path, talks=TALKS, column="messages"):
    path.write_text("".join(json.dumps({column: messages, "id": i}) + "\n" for i, messages in enumerate(talks)))
    return str(path)


def write_parquet(path, talks=TALKS, column="messages"):
    table = pyarrow.table({"id": range(len(talks)), column: talks})
    pyarrow.parquet.write_table(table, path, row_group_size=5)
    return str(path)


@pytest.fixture
def jsonl(tmp_path):
    return write_jsonl(tmp_path / "chat.jsonl")


def dataset(path, **options):
    return ChatDataset([path], TOKENIZER, **{"seq_length": 64, "seed": 1, **options})


def answer(sample):
    return TOKENIZER.decode(sample.tokens_S[sample.loss_mask_S].tolist())


def same(a, b):
    for name in (field.name for field in fields(a)):
        x, y = getattr(a, name), getattr(b, name)
        assert torch.equal(x, y) and x.dtype == y.dtype if isinstance(x, torch.Tensor) else x == y
    return True


def test_sample_is_the_rendered_conversation(jsonl):
    sample = dataset(jsonl, items=range(3, 4)).sample(5)
    ids, mask = render(TALKS[3], TOKENIZER)
    assert sample.tokens_S.tolist() == ids and sample.tokens_S.dtype == torch.int64
    assert sample.loss_mask_S.tolist() == mask and sample.loss_mask_S.dtype == torch.bool
    assert sample.document_S.tolist() == [0] * len(ids) and sample.document_S.dtype == torch.int32
    assert sample.position_S.tolist() == list(range(len(ids)))
    assert sample.index == 5


def test_every_epoch_is_a_permutation(jsonl):
    data, n = dataset(jsonl), len(TALKS)
    assert len(data) == n
    expected = sorted(messages[1]["content"] for messages in TALKS)
    epochs = [[answer(data.sample(epoch * n + i)) for i in range(n)] for epoch in range(3)]
    assert all(sorted(epoch) == expected for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [answer(dataset(jsonl, seed=2).sample(i)) for i in range(n)] != epochs[0]
    backwards = [answer(dataset(jsonl).sample(i)) for i in reversed(range(3 * n))]
    assert backwards[::-1] == sum(epochs, [])


def test_parquet_and_jsonl_agree(jsonl, tmp_path, monkeypatch):
    monkeypatch.setattr(chat_files, "_ROW_GROUP_CACHE_BYTES", 1000)  # so that row groups are dropped and read again
    parquet = dataset(write_parquet(tmp_path / "chat.parquet"))
    assert all(same(parquet.sample(i), dataset(jsonl).sample(i)) for i in range(30))
    assert len(parquet._files[0]._cache) < 5


def test_several_files_and_a_named_column(tmp_path):
    paths = [
        write_jsonl(tmp_path / "a.jsonl", TALKS[:9], "chat"),
        write_parquet(tmp_path / "b.parquet", TALKS[9:], "chat"),
    ]
    data = ChatDataset(paths, TOKENIZER, seq_length=64, seed=1, column="chat")
    one = dataset(write_jsonl(tmp_path / "all.jsonl"))
    assert all(same(data.sample(i), one.sample(i)) for i in range(len(TALKS)))


def test_blank_lines_and_a_missing_last_newline(tmp_path):
    path = tmp_path / "chat.jsonl"
    lines = [json.dumps({"messages": messages}) for messages in TALKS]
    path.write_text("\n" + "\n\n  \n".join(lines))
    (tmp_path / "tidy").mkdir()
    tidy = dataset(write_jsonl(tmp_path / "tidy" / "chat.jsonl"))
    assert all(same(dataset(str(path)).sample(i), tidy.sample(i)) for i in range(len(TALKS)))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"messages": [', "chat.jsonl, line 3: "),
        ("[1, 2]", 'line 3: it must be a JSON object with the key "messages"'),
        ('{"text": "hi"}', 'line 3: it must be a JSON object with the key "messages"'),
        ('{"messages": "hi"}', "line 3: A conversation must be a non-empty list"),
        ('{"messages": [{"role": "user", "content": "hi"}]}', "line 3: The conversation has no assistant"),
        ('{"messages": [{"role": "assistant", "content": "\xff"}]}', "line 3: .*decode"),
    ],
)
def test_broken_line_is_named_at_start(tmp_path, line, reason):
    path = tmp_path / "chat.jsonl"
    good = json.dumps({"messages": TALKS[0]})
    path.write_bytes(f"{good}\n\n{line}\n{good}\n".encode("latin-1"))
    with pytest.raises(ValueError, match=reason):
        dataset(str(path))


def test_files_without_samples(tmp_path):
    for name, write in (
        ("a.jsonl", lambda p: p.write_text("\n\n")),
        ("b.parquet", lambda p: write_parquet(p, [])),
    ):
        write(tmp_path / name)
    with pytest.raises(ValueError, match="a.jsonl has no samples"):
        dataset(str(tmp_path / "a.jsonl"))
    with pytest.raises(ValueError, match="b.parquet has no samples"):
        dataset(str(tmp_path / "b.parquet"))
    with pytest.raises(ValueError, match="nowhere.jsonl does not exist"):
        dataset(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(ValueError, match="no chat files"):
        ChatDataset([], TOKENIZER, 64, 1)


def test_broken_parquet(tmp_path):
    path = tmp_path / "c.parquet"
    path.write_text("not parquet")
    with pytest.raises(ValueError, match="c.parquet is not a parquet file"):
        dataset(str(path))
    write_parquet(path, column="text")
    with pytest.raises(ValueError, match='no column "messages", only id, text'):
        dataset(str(path))


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_a_file_that_changes_under_the_run(tmp_path, write):
    """What was fine at start and is not when it is drawn is still named."""
    path = tmp_path / ("chat.parquet" if write is write_parquet else "chat.jsonl")
    data = dataset(write(path, [talk("yes")] * 3))
    for old, new, reason in (("assistant", "attendant", "no assistant"), ("user", "tool", "has the role 'tool'")):
        write(path, json.loads(json.dumps([talk("yes")] * 3).replace(old, new)))
        with pytest.raises(ValueError, match=f"chat.(jsonl, line|parquet, row) .: .*{reason}"):
            pickle.loads(pickle.dumps(data)).sample(0)


def test_truncation_is_counted_and_warned_of_once(jsonl):
    ids, mask = render(TALKS[0], TOKENIZER)
    data = dataset(jsonl, items=range(0, 1), seq_length=len(ids) - 3)
    with pytest.warns(UserWarning, match=r"line 1: .* loses 3 supervised tokens") as caught:
        samples = [data.sample(i) for i in range(4)]
    assert len(caught) == 1
    assert all(sample.tokens_S.tolist() == ids[:-3] for sample in samples)
    assert (data.truncated_samples, data.lost_supervised_tokens) == (4, 12)


def test_block_fill_is_part_of_the_answer(jsonl):
    plain, filled = dataset(jsonl), dataset(jsonl, fill_block=8)
    for i in range(10):
        before, after = plain.sample(i), filled.sample(i)
        n = len(before)
        assert len(after) == -(-n // 8) * 8
        assert after.tokens_S.tolist() == before.tokens_S.tolist() + [EOS] * (len(after) - n)
        assert after.loss_mask_S[n:].all() and not after.document_S.any()
        assert after.position_S.tolist() == list(range(len(after)))
    assert len(dataset(jsonl, fill_block=100).sample(0)) == 64  # never beyond the sequence length


def test_sample_length_that_no_block_divides_is_padded_inside(jsonl):
    """37 tokens in blocks of 8: the three pad positions are neither seen nor scored."""
    sample = pad_sample(dataset(jsonl, seq_length=37, fill_block=64).sample(0), 40, PAD, supervise=False)
    assert len(sample) == 40
    assert sample.document_S[37:].tolist() == [PADDING_DOCUMENT] * 3 and not sample.loss_mask_S[37:].any()


def test_pad_that_is_eos_leaves_the_last_eos_supervised(jsonl):
    sample = dataset(jsonl).sample(0)
    n = len(sample)
    padded = pad_sample(sample, n + 4, EOS, supervise=False)
    assert padded.tokens_S[n - 1 :].tolist() == [EOS] * 5
    assert padded.loss_mask_S[n - 1 :].tolist() == [True] + [False] * 4


def test_last_turn_only(tmp_path):
    data = dataset(write_jsonl(tmp_path / "chat.jsonl", [talk("one") + talk("two")]), last_turn_only=True)
    assert answer(data.sample(0)) == "two"


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_survives_pickling_and_forking(tmp_path, write):
    data = dataset(write(tmp_path / ("chat.parquet" if write is write_parquet else "chat.jsonl")))
    expected = [data.sample(i) for i in range(30)]
    assert all(same(pickle.loads(pickle.dumps(data)).sample(i), expected[i]) for i in range(3))
    loader = torch.utils.data.DataLoader(
        data,
        batch_size=None,
        sampler=range(30),
        num_workers=2,
        multiprocessing_context=multiprocessing.get_context("fork"),
    )
    assert all(same(a, b) for a, b in zip(loader, expected, strict=True))


@pytest.fixture
def args(jsonl):
    return Namespace(
        sft_data_path=[jsonl],
        sft_valid_data_path=None,
        split=None,
        sft_last_turn_only=False,
        chat_template=None,
        dllm_pad_block_size=None,
        dllm_sequence_length=64,
        seed=7,
    )


def test_build_without_validation(args):
    train, valid, test = build_chat(args, TOKENIZER)
    assert len(train) == len(TALKS) and valid is None and test is None
    assert same(train.sample(3), dataset(args.sft_data_path[0], seed=7).sample(3))


def test_build_with_a_split(args):
    args.split = "80,20"
    train, valid, test = build_chat(args, TOKENIZER)
    assert (train.items, valid.items, test) == (range(0, 18), range(18, 23), None)
    assert {answer(valid.sample(i)) for i in range(5)} == {messages[1]["content"] for messages in TALKS[18:]}
    args.seed = 8  # another training order, the same validation order
    other_train, other_valid, _ = build_chat(args, TOKENIZER)
    assert [answer(train.sample(i)) for i in range(18)] != [answer(other_train.sample(i)) for i in range(18)]
    assert all(same(valid.sample(i), other_valid.sample(i)) for i in range(5))


def test_build_with_validation_files_and_a_template(args, tmp_path):
    args.sft_valid_data_path = [write_jsonl(tmp_path / "valid.jsonl", TALKS[:4])]
    args.chat_template = str(tmp_path / "template.jinja")
    with pytest.raises(ValueError, match="template.jinja does not exist"):
        build_chat(args, TOKENIZER)
    (tmp_path / "template.jinja").write_text("{% for m in messages %}{{ '#' + m.content }}{% endfor %}")
    train, valid, test = build_chat(args, TOKENIZER)
    assert (len(train), len(valid), test) == (len(TALKS), 4, None)
    assert TOKENIZER.decode(valid.sample(0).tokens_S.tolist()).startswith("#?#answer")
    args.split = "1,1"
    with pytest.raises(ValueError, match="both define validation data"):
        build_chat(args, TOKENIZER)


def test_splits():
    assert split_items("969,30,1", 1000) == [range(0, 969), range(969, 999), range(999, 1000)]
    assert split_items("1,0,1", 3)[1] is None
    for split in ("a,b", "", "1,-1", "0,0", "1,1,1,1", "nan,1"):
        with pytest.raises(ValueError, match="one to three non-negative weights"):
            split_items(split, 10)
    with pytest.raises(ValueError, match="leaves no test data of 20 conversations"):
        split_items("969,30,1", 20)
