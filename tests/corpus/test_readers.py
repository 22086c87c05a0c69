from __future__ import annotations

import gzip
import json
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptq_dynamics.core.errors import UserError
from ptq_dynamics.corpus import readers
from ptq_dynamics.corpus.readers import READERS, normalise


def read(name, members):
    """Documents with the paragraphs as the corpus will hold them, empty ones left out."""
    return [
        (i, [q for p in paragraphs if (q := normalise(p))])
        for i, paragraphs in READERS[name]((n, d if isinstance(d, bytes) else d.encode()) for n, d in members)
    ]


def test_every_reader_has_a_name_in_the_configuration():
    assert set(READERS) == set(typing.get_args(readers.ReaderName))


@given(st.text())
def test_normalise_gives_one_line_and_is_idempotent(text):
    once = normalise(text)
    assert len(once.splitlines()) <= 1 and "  " not in once and "\0" not in once
    assert normalise(once) == once


def test_strip_html_parts_at_blocks_and_keeps_inline_text():
    text = (
        "<p>See <a href='https://x.org/a>b'>the guide</a> &amp; <code>Put&lt;T&gt;</code>.</p><ul><li>one</li>"
        "<li>two</li></ul><pre>curl -X POST</pre><note><p>Mind it.</p></note>a < b<!-- no -->"
    )
    got = [q for p in readers.strip_html(text.replace("a>b", "a")) if (q := normalise(p))]
    assert got == ["See the guide & Put<T>.", "one", "two", "Mind it.", "a < b"]


def test_strip_html_undoes_markup_that_was_escaped_twice():
    assert [p for p in readers.strip_html("&lt;p&gt;A job.&lt;/p&gt;") if p] == ["A job."]


def test_strip_markdown_drops_code_and_link_targets():
    text = "Read [the docs](https://x.org/y_z).\n\nRun:\n```sh\nrm -rf /\n\nls\n```\nthen stop. ```open"
    got = [normalise(p) for p in readers.strip_markdown(text)]
    assert got == ["Read the docs.", "Run:", "then stop."]


@pytest.mark.parametrize(
    ("text", "prose"),
    [
        ("The name of the rôle that the caller's account uses, if there is one.", True),
        ('{"bindings": [{"role": "roles/viewer", "members": ["user:a@b.c"]}]}', False),
        ("Format: `projects/{project}/locations/{location}/jobs/{job}`", False),
        ("2018-11-05T13:15:30Z 2019-11-05T13:15:30Z", False),
    ],
)
def test_is_prose(text, prose):
    assert readers.is_prose(text) is prose


def test_botocore_groups_versions_of_a_service_and_reads_gzip():
    old = {
        "documentation": "<p>An old text.</p>",
        "shapes": {"documentation": {"documentation": "<p>Deep.</p>"}},
    }
    new = {"operations": [{"documentation": "<p>New.</p><p>List: a1 b2 c3 d4 e5 f6 g7 h8.</p>"}]}
    got = read(
        "botocore",
        [
            ("botocore/data/s3-x/2020-01-01/service-2.json", '{"documentation": "<p>Other.</p>"}'),
            ("botocore/data/s3/2006-03-01/service-2.json.gz", gzip.compress(json.dumps(old).encode())),
            ("botocore/data/s3/2020-03-01/service-2.json", json.dumps(new)),
        ],
    )
    assert got == [("s3-x", ["Other."]), ("s3", ["An old text.", "Deep.", "New."])]


def test_google_discovery_reads_descriptions_and_enum_descriptions():
    api = {
        "description": "An API of [Google](https://x.org).",
        "properties": {"description": {"type": "string", "description": "The text itself."}},
        "enumDescriptions": ["First choice.", "Second choice."],
        "title": "not read",
    }
    got = read(
        "google_discovery",
        [
            ("d/a.v1.json", json.dumps(api)),
            ("d/a.v2.json", '{"description": "Newer."}'),
            ("d/b.v1.json", "{}"),
        ],
    )
    first = ["An API of Google.", "The text itself.", "First choice.", "Second choice.", "Newer."]
    assert got == [("a", first), ("b", [])]


def test_gcide_writes_a_paragraph_per_sense_and_a_document_per_hundred_entries():
    def entry(word):
        senses = [
            {
                "text": "A thing {2}; a trade.\n[1913 Webster]",
                "examples": ["He has it.", "So <-- p. 3 --> do I."],
            },
            {"text": "Another. [Webster 1913 Suppl.]", "examples": []},
        ]
        return {"entry": word, "pos": [{"part_of_speech": "n.", "definitions": senses}]}

    members = [("x/words_Q.json", json.dumps({f"q{i}": entry(f"q{i}") for i in range(150)}))]
    got = read("gcide", members)
    assert [i for i, _ in got] == ["Q/00000", "Q/00100"]
    assert [len(p) for _, p in got] == [200, 100]
    assert got[1][1][:2] == ["q100, n. A thing ; a trade. He has it. So do I.", "q100, n. Another."]


def test_wikiextractor_one_document_per_article_without_its_tags():
    text = '<doc id="7" url="u" title="A">\nA\n\nFirst &amp; last.\n\n</doc>\n<doc id="9" url="u" title="B">\nB\n\n</doc>\n'
    assert read("wikiextractor", [("w", text)]) == [("w#7", ["A", "First & last."]), ("w#9", ["B"])]


def test_lines_and_plain():
    assert read("lines", [("f", "one two\nthree\n")]) == [("f#0", ["one two"]), ("f#1", ["three"])]
    text = "\ufeffone\ntwo\n\n \nthree\r\n\r\nfour"
    assert read("plain", [("f", text)]) == [("f#0", ["one two", "three", "four"])]


def test_plain_cuts_a_long_file_at_paragraphs():
    paragraphs = [f"{i:04d} " + "word " * 200 for i in range(150)]  # about 1,000 characters each
    got = read("plain", [("f", "\n\n".join(paragraphs))])
    assert [i for i, _ in got] == ["f#0", "f#1", "f#2"]
    assert [p for _, ps in got for p in ps] == [normalise(p) for p in paragraphs]


def test_not_utf8_names_the_file_and_the_byte():
    with pytest.raises(UserError, match=r"^notes\.txt: not UTF-8 \(byte 4\); convert"):
        read("plain", [("notes.txt", "caf\u00e9s".encode("latin-1").replace(b"c", b"ac"))])


@pytest.mark.parametrize("data", ["{not json", gzip.compress(b"{}")[:-9]])
def test_not_json_names_the_file(data):
    name = "d/x/1/service-2.json" + (".gz" if isinstance(data, bytes) else "")
    with pytest.raises(UserError, match=r"^d/x/1/service-2\.json.*: not valid JSON"):
        read("botocore", [(name, data)])
