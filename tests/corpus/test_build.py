from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ptq_dynamics.core.config import load
from ptq_dynamics.core.errors import UserError
from ptq_dynamics.corpus import build as module
from ptq_dynamics.corpus.build import (
    CorpusConfig,
    build,
    first_occurrences,
    save_tokenizer,
    sets_table,
    sources_table,
    train_tokenizer,
)
from ptq_dynamics.corpus.tokens import TokenSet

WORDS = (
    "of and the water stone river a slow bright naïve green walks under over near long house tree light dark "
    "keeps holds turns carries finds every no some morning evening winter summer bread salt glass wind"
).split()


def paragraph(rng):
    return " ".join(rng.choices(WORDS, k=rng.randint(8, 20))).capitalize() + "."


def files_source(name, role="train", **keys):
    return {"kind": "files", "name": name, "role": role, "license": "own", "files": [f"{name}/*.txt"], **keys}


def params(**keys):
    sources = [
        files_source("first"),
        files_source("second"),
        files_source("shop", "calibration"),
        files_source("wiki", "evaluation"),
    ]
    base = {
        "seed": 1,
        "vocab_size": 300,
        "splits": {"validation": 0.2, "calibration": 0.15},
        "bpe_sample_mb": 1,
        "min_paragraph_chars": 20,
        "sources": sources,
    }
    return base | keys


def config(**keys):
    return load(CorpusConfig, params(**keys), "params.yaml: corpus")


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Four folders of text; some paragraphs repeat within a file, across files and across sources."""
    monkeypatch.setenv("PTQ_DYNAMICS_ROOT", str(tmp_path))
    rng = random.Random(0)
    common = [paragraph(rng) for _ in range(6)]
    for name, count in (("first", 25), ("second", 15), ("shop", 4), ("wiki", 4)):
        (tmp_path / name).mkdir()
        for i in range(count):
            text = [paragraph(rng) for _ in range(8)] + rng.sample(common, 2) + ["Too short."]
            text.append(text[0])
            (tmp_path / name / f"{i:02d}.txt").write_text("\n\n".join(text), encoding="utf-8")
    return tmp_path


def decoded(folder, corpus):
    """Set name -> its documents as text, by the tokenizer's own decoding."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer/tokenizer.json"))
    out = {}
    for name in corpus["sets"]:
        s = TokenSet.open(folder, name)
        ids = [s.tokens[a:b].tolist() for a, b in zip(s.documents[:-1], s.documents[1:], strict=True)]
        assert all(
            i[-1] == 0 and 0 not in i[:-1] for i in ids
        )  # <|endoftext|> closes a document, nowhere else
        out[name] = [tokenizer.decode(i[:-1], skip_special_tokens=False) for i in ids]
    return out


def test_sets_hold_every_distinct_paragraph_once_and_split_by_document(root):
    corpus = build(config())
    sets = decoded(root / "data/corpus", corpus)
    assert list(sets) == ["train", "validation", "calibration-in-domain", "calibration", "evaluation"]

    seen, expected = set(), {}
    for source in ("first", "second", "shop", "wiki"):  # training text first: the others yield
        for file in sorted((root / source).iterdir()):
            raw = file.read_text(encoding="utf-8").split("\n\n")
            fresh = [p for p in dict.fromkeys(raw) if len(p) >= 20 and p not in seen]
            seen.update(fresh)
            expected["\n".join(fresh)] = source
    got = {text: name for name, texts in sets.items() for text in texts}
    assert got.keys() == expected.keys()
    assert sum(map(len, sets.values())) == len(expected)
    home = {"shop": {"calibration"}, "wiki": {"evaluation"}}
    for text, name in got.items():
        assert name in home.get(expected[text], {"train", "validation", "calibration-in-domain"})


def test_documents_of_the_sources_are_mixed(root):
    corpus = build(config())
    first = set("\n\n".join(p.read_text() for p in (root / "first").iterdir()).split("\n\n"))
    train = decoded(root / "data/corpus", corpus)["train"]
    order = [text.split("\n")[0] in first for text in train]
    assert sum(a != b for a, b in zip(order, order[1:], strict=False)) > 5


def test_corpus_json_counts(root):
    corpus = build(config())
    folder = root / "data/corpus"
    assert json.loads((folder / "corpus.json").read_text()) == corpus
    sets = decoded(folder, corpus)
    for name, entry in corpus["sets"].items():
        assert entry["documents"] == len(sets[name])
        assert entry["bytes"] == sum(len(t.encode()) for t in sets[name])
        assert (
            entry["tokens"]
            == TokenSet.open(folder, name).tokens.size
            == sum(entry["tokens_by_source"].values())
        )
        assert entry["bytes_per_token"] == pytest.approx(entry["bytes"] / entry["tokens"])
    by_name = {s["name"]: s for s in corpus["sources"]}
    first = by_name["first"]
    # 12 paragraphs a file: 1 too short, 1 twice in the file, 2 common of which 6 are kept overall
    assert first["dropped_short"] == 25 and first["paragraphs"] == 25 * 8 + 6
    assert first["dropped_duplicate"] == 25 + 25 * 2 - 6
    assert by_name["wiki"]["paragraphs"] == 4 * 8
    assert list(sets_table(corpus)["tokens"]) == [s["tokens"] for s in corpus["sets"].values()]
    assert list(sources_table(corpus).index) == ["first", "second", "shop", "wiki"]


def test_same_bytes_in_another_process_and_folder(root):
    build(config())
    code = (
        "import json, sys; from pathlib import Path; from ptq_dynamics.core.config import load\n"
        "from ptq_dynamics.corpus.build import CorpusConfig, build\n"
        "build(load(CorpusConfig, json.loads(sys.argv[1]), 'test'), Path('other/corpus'), Path('other/downloads'))"
    )
    subprocess.run(
        [sys.executable, "-c", code, json.dumps(params())], cwd=root, check=True, capture_output=True
    )
    files = sorted(
        p.relative_to(root / "data/corpus") for p in (root / "data/corpus").rglob("*") if p.is_file()
    )
    assert len(files) == 13
    for file in files:
        assert (root / "data/corpus" / file).read_bytes() == (root / "other/corpus" / file).read_bytes(), file


def test_a_new_source_moves_no_document_of_the_others(root):
    def where(corpus):
        texts = decoded(root / "data/corpus", corpus)
        return {t: name for name, docs in texts.items() for t in docs}

    before = where(build(config()))
    (root / "third").mkdir()
    rng = random.Random(9)
    (root / "third/new.txt").write_text("\n\n".join(paragraph(rng) for _ in range(30)))
    after = where(build(config(sources=[*params()["sources"], files_source("third")])))
    assert len(after) == len(before) + 1
    assert {t: after[t] for t in before} == before


def test_second_build_does_nothing_and_a_damaged_shard_is_made_again(root, monkeypatch):
    corpus = build(config())
    shard = root / "data/corpus/train.bin"
    good, stamp = shard.read_bytes(), shard.stat().st_mtime_ns
    assert build(config()) == corpus and shard.stat().st_mtime_ns == stamp
    shard.write_bytes(good[:-2])
    monkeypatch.setattr(module, "documents", None)  # extracted text is still there
    assert build(config()) == corpus and shard.read_bytes() == good


def test_goes_on_after_a_kill(root, monkeypatch):
    whole = build(config())
    good = {p.name: p.read_bytes() for p in (root / "data/corpus").iterdir() if p.is_file()}
    changed = config(seed=2)
    encode, done = module._encode, []

    def killed(folder, name, *rest):
        if name == "calibration":
            raise KeyboardInterrupt
        done.append(name)
        return encode(folder, name, *rest)

    monkeypatch.setattr(module, "_encode", killed)
    with pytest.raises(KeyboardInterrupt):
        build(changed)
    assert build(config()) == whole  # the former corpus is untouched
    assert {p.name: p.read_bytes() for p in (root / "data/corpus").iterdir() if p.is_file()} == good

    monkeypatch.setattr(module, "_encode", encode)
    monkeypatch.setattr(module, "documents", None)
    monkeypatch.setattr(module, "train_tokenizer", None)
    written = []
    atomic_file = module.atomic_file
    monkeypatch.setattr(module, "atomic_file", lambda p: written.append(p.name) or atomic_file(p))
    resumed = build(changed)
    assert written == ["calibration.bin", "calibration.idx", "evaluation.bin", "evaluation.idx"]
    monkeypatch.undo()
    monkeypatch.setenv("PTQ_DYNAMICS_ROOT", str(root))
    assert build(changed, root / "x/corpus", root / "x/downloads") == resumed
    assert not list((root / "data").glob(".tmp-*"))


def test_a_source_that_fails_leaves_the_former_corpus_and_the_extracted_text(root):
    build(config())
    good = (root / "data/corpus/corpus.json").read_bytes()
    extracted = {p.name for p in (root / "data/downloads/extracted").iterdir()}
    (root / "fourth").mkdir()
    (root / "fourth/x.txt").write_text("\n\n  \n")
    more = [*params()["sources"], files_source("fourth")]
    with pytest.raises(
        UserError, match=r"source 'fourth': no paragraph of at least 20 characters .*is the text empty"
    ):
        build(config(sources=more))
    assert (root / "data/corpus/corpus.json").read_bytes() == good
    assert {p.name for p in (root / "data/downloads/extracted").iterdir()} == extracted


def test_not_utf8_stops_the_build(root):
    (root / "second/99.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(UserError, match=r"^second/99\.txt: not UTF-8 \(byte 3\)"):
        build(config())


def test_limit_caps_the_text_of_a_source(root):
    sources = params()["sources"]
    sources[3] = files_source("wiki", "evaluation", limit_mb=0.001)
    text = build(config(sources=sources))["sets"]["evaluation"]["bytes"]
    assert 900 < text < 1200


def test_an_empty_set_is_told(root):
    with pytest.raises(
        UserError, match=r"corpus set 'calibration-in-domain' got none of \d+ documents; raise"
    ):
        build(config(splits={"validation": 0.2, "calibration": 1e-9}))


def test_text_too_small_for_the_vocabulary(root):
    with pytest.raises(UserError, match=r"the text yields \d+ tokens, vocab_size is 5000; lower it"):
        build(config(vocab_size=5000))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"sources": [files_source("a"), files_source("a")]}, "sources need names of their own, got a, a"),
        ({"sources": [files_source("a", "evaluation")]}, "no source has role train"),
        ({"vocab_size": 256}, "'vocab_size': .*greater than or equal to 257"),
        ({"splits": {"validation": 0.6, "calibration": 0.1}}, "'splits.validation': .*less than 0.5"),
        ({"vocabsize": 300}, "unknown key 'vocabsize'; did you mean 'vocab_size'"),
    ],
)
def test_bad_configuration(change, told):
    with pytest.raises(UserError, match=rf"^params\.yaml: corpus: .*{told}") as e:
        config(**change)
    assert "\n" not in str(e.value)


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 9), max_size=12)), min_size=1, max_size=5))
def test_first_occurrences_against_a_plain_loop(sources):
    hashes = [np.array(h, dtype=np.uint64) for _, h in sources]
    later = [x for x, _ in sources]
    seen, expected = set(), [[None] * len(h) for h in hashes]
    for turn in (False, True):
        for i, h in enumerate(hashes):
            if later[i] == turn:
                for j, value in enumerate(h.tolist()):
                    expected[i][j] = value not in seen
                    seen.add(value)
    assert [k.tolist() for k in first_occurrences(hashes, later)] == expected


@pytest.fixture(scope="module")
def auto_tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    rng = random.Random(0)
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer([paragraph(rng) for _ in range(300)], 400), folder)
    return AutoTokenizer.from_pretrained(folder)


def test_tokenizer_loads_as_a_transformers_tokenizer(auto_tokenizer):
    assert len(auto_tokenizer) == 400
    assert auto_tokenizer.eos_token == "<|endoftext|>" and auto_tokenizer.eos_token_id == 0
    assert auto_tokenizer("stone<|endoftext|>").input_ids[-1] == 0
    assert len(auto_tokenizer(" water").input_ids) == 1  # it did learn words


@settings(deadline=None)
@given(st.text())
@example("naïve  日本語 🎉\t\r\n\x00 it 's ,  . don ' t")
@example("<|endoftext|>")
def test_tokenizer_round_trip_is_exact(auto_tokenizer, text):
    assert auto_tokenizer.decode(auto_tokenizer(text).input_ids) == text


def test_the_name_of_the_end_token_in_a_text_is_text(root):
    (root / "wiki/00.txt").write_text("The special token <|endoftext|> ends a document, they say.")
    corpus = build(config())
    texts = decoded(root / "data/corpus", corpus)["evaluation"]  # asserts that 0 only ends documents
    assert "The special token <|endoftext|> ends a document, they say." in texts


def test_ids_in_the_shards_are_those_of_the_saved_tokenizer(root):
    from transformers import AutoTokenizer

    corpus = build(config())
    folder = root / "data/corpus"
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    s = TokenSet.open(folder, "validation")
    ids = [i for text in decoded(folder, corpus)["validation"] for i in [*tokenizer(text).input_ids, 0]]
    assert s.tokens.tolist() == ids and s.vocab_size == len(tokenizer)
    assert s.tokens.max() < s.vocab_size and Path(folder, "validation.bin").stat().st_size == 2 * len(ids)
