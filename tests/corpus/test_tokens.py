from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptq_dynamics.core.errors import UserError
from ptq_dynamics.corpus.tokens import TokenSet


def write(folder, ids, dtype="uint16", name="train"):
    """A corpus of one set, written from the description of the format alone."""
    data = np.asarray(ids).astype(f"<u{np.dtype(dtype).itemsize}").tobytes()
    index = np.array([0, len(ids)], dtype="<i8").tobytes()
    (folder / f"{name}.bin").write_bytes(data)
    (folder / f"{name}.idx").write_bytes(index)
    entry = {
        "documents": 1,
        "tokens": len(ids),
        "bytes_per_token": 2.5,
        "sha256": hashlib.sha256(data).hexdigest(),
        "index_sha256": hashlib.sha256(index).hexdigest(),
    }
    corpus = {"dtype": dtype, "tokenizer": {"vocab_size": 99}, "sets": {name: entry}}
    (folder / "corpus.json").write_text(json.dumps(corpus))
    return TokenSet.open(folder, name)


def in_memory(n):
    """A set whose token ids are their own positions."""
    return TokenSet(
        name="train",
        tokens=np.arange(n, dtype=np.uint32),
        documents=np.array([0, n]),
        id="x",
        vocab_size=n,
        bytes_per_token=1.0,
    )


@pytest.mark.parametrize(("dtype", "big"), [("uint16", 65_535), ("uint32", 70_000)])
def test_open_gives_back_what_was_written(tmp_path, dtype, big):
    ids = [5, 0, big, 7, 1, 0]
    s = write(tmp_path, ids, dtype)
    assert s.tokens.tolist() == ids and s.tokens.dtype == np.dtype(dtype)
    assert s.documents.tolist() == [0, 6] and s.vocab_size == 99 and s.bytes_per_token == 2.5
    assert s.id == hashlib.sha256((tmp_path / "train.bin").read_bytes()).hexdigest()[:12]
    assert s.blocks(5).tolist() == [ids] and s.blocks(5).dtype == np.int64


def test_blocks_by_hand():
    assert in_memory(9).blocks(4).tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]  # the last fits exactly
    assert in_memory(8).blocks(4).tolist() == [[0, 1, 2, 3, 4]]  # its label is missing: dropped
    assert in_memory(12).blocks(4).tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    assert in_memory(9).blocks(4, max_tokens=7).tolist() == [[0, 1, 2, 3, 4]]
    assert in_memory(9).blocks(4, max_tokens=8).tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]


@given(n=st.integers(2, 300), length=st.integers(1, 40))
def test_blocks_predict_each_token_once_and_labels_are_inputs_shifted(n, length):
    if n <= length:
        with pytest.raises(UserError, match=f"has {n} tokens, too few for one sequence of {length}"):
            in_memory(n).blocks(length)
        return
    blocks = in_memory(n).blocks(length)
    assert np.array_equal(blocks[:, 1:], blocks[:, :-1] + 1)
    labels = blocks[:, 1:].ravel()
    assert labels.tolist() == list(range(1, 1 + len(labels)))
    assert n - 1 - length < labels.size <= n - 1  # nothing that fits is left out


@settings(deadline=None)
@given(n=st.integers(10, 200), length=st.integers(1, 9), batch=st.integers(1, 50), seed=st.integers(0, 2**63))
def test_batches_of_an_epoch_hold_every_window_once_in_an_order_of_their_own(n, length, batch, seed):
    s = in_memory(n)
    windows = (n - 1) // length
    steps = -(-3 * windows // batch)
    stream = np.concatenate([s.batch(seed, k, batch, length) for k in range(steps)])
    assert stream.shape == (steps * batch, length + 1) and stream.dtype == np.int64
    assert (np.diff(stream, axis=1) == 1).all()
    for epoch in range(3):
        part = stream[epoch * windows : (epoch + 1) * windows, 0]
        assert sorted(part) == list(range(0, windows * length, length))


def test_the_stream_does_not_depend_on_batch_size_or_on_earlier_calls():
    s = in_memory(1000)
    by_six = [s.batch(3, k, 6, 9) for k in range(60)]  # 111 windows: three epochs
    fresh = in_memory(1000)
    assert np.array_equal(
        np.concatenate([fresh.batch(3, k, 2, 9) for k in range(180)]), np.concatenate(by_six)
    )
    assert np.array_equal(in_memory(1000).batch(3, 41, 6, 9), by_six[41])


def test_epochs_and_seeds_have_different_orders():
    s = in_memory(1001)
    first, second = (s.batch(0, k, 100, 10)[:, 0] for k in (0, 1))
    assert sorted(first) == sorted(second) and not np.array_equal(first, second)
    assert not np.array_equal(first, s.batch(1, 0, 100, 10)[:, 0])
    assert np.mean(first[1:] == first[:-1] + 10) < 0.1  # shuffled, not only rotated


def test_the_order_of_an_epoch_is_pinned():
    # changing it would change every trained model: a bit generator's raw stream is stable across numpy versions
    assert in_memory(91).batch(7, 0, 9, 10)[:, 0].tolist() == [80, 40, 10, 60, 30, 20, 70, 50, 0]


@settings(deadline=None)
@given(n=st.integers(1, 300), length=st.integers(1, 30), count=st.integers(1, 12), seed=st.integers(0, 2**63))
def test_calibration_windows_lie_inside_and_never_overlap(n, length, count, seed):
    s = in_memory(n)
    if count > n // length:
        with pytest.raises(
            UserError, match=f"at most {n // length} calibration sequences of {length}, {count} asked"
        ):
            s.calibration(count, length, seed)
        return
    windows = s.calibration(count, length, seed)
    assert windows.shape == (count, length) and windows.dtype == np.int64
    assert len(np.unique(windows)) == count * length and windows.min() >= 0 and windows.max() < n
    assert np.array_equal(windows, in_memory(n).calibration(count, length, seed))


def test_calibration_reaches_the_whole_set_and_follows_the_seed():
    s = in_memory(103)
    draws = [s.calibration(3, 10, seed) for seed in range(200)]
    assert set(np.concatenate(draws).ravel()) == set(range(103))  # the last three tokens too
    assert not np.array_equal(draws[0], draws[1])


def test_cut_altered_missing_and_unknown_are_told_in_one_line(tmp_path):
    write(tmp_path, list(range(50)))
    shard = tmp_path / "train.bin"
    good = shard.read_bytes()
    shard.write_bytes(good[:-1])
    with pytest.raises(UserError, match=r"train\.bin: 99 bytes instead of 100, .*run the corpus stage again"):
        TokenSet.open(tmp_path, "train")
    shard.write_bytes(good[:40] + b"\xff" + good[41:])
    with pytest.raises(
        UserError, match=r"train\.bin: its contents differ from the SHA-256 in corpus\.json; run"
    ):
        TokenSet.open(tmp_path, "train")
    shard.unlink()
    with pytest.raises(UserError, match=r"train\.bin: no such file; run the corpus stage"):
        TokenSet.open(tmp_path, "train")
    shard.write_bytes(good)
    (tmp_path / "train.idx").write_bytes(b"\0" * 16)
    with pytest.raises(UserError, match=r"train\.idx: its contents differ"):
        TokenSet.open(tmp_path, "train")
    with pytest.raises(UserError, match="no set 'test' in this corpus; it has train"):
        TokenSet.open(tmp_path, "test")
    with pytest.raises(UserError, match=r"corpus\.json: no such file; run the corpus stage"):
        TokenSet.open(tmp_path / "elsewhere", "train")


def test_too_short_for_a_window_or_a_block():
    with pytest.raises(
        UserError, match="set 'train' has 8 tokens, too few for one sequence of 8 and its label"
    ):
        in_memory(8).batch(0, 0, 1, 8)
    with pytest.raises(UserError, match="max_tokens 3 is less than one block of 4"):
        in_memory(9).blocks(4, max_tokens=3)
