from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from ptq_dynamics.core import provenance

CODE = '''"""What it is."""

import math


class Thing:
    """A thing."""

    size = 3


def area(r: float) -> float:
    """Of a circle."""
    # by definition
    return math.pi * r**2
'''


@pytest.fixture
def fingerprint_of(tmp_path, monkeypatch):
    """The fingerprint of a package whose one module has the given code."""
    package = tmp_path / "shapes"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))

    def of(code: str, name: str = "shapes.circle") -> str:
        (package / "circle.py").write_text(code)
        provenance.fingerprint.cache_clear()
        importlib.invalidate_caches()
        return provenance.fingerprint(name)

    yield of
    provenance.fingerprint.cache_clear()
    for name in [n for n in sys.modules if n.startswith("shapes")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("# by definition", "# because of the ancients"),
        ("    # by definition\n", ""),
        ("Of a circle.", "Of a disc, in square metres.\n\n    Args:\n        r: radius."),
        ('    """Of a circle."""\n', ""),
        ('    """A thing."""\n\n', ""),
        ('"""What it is."""\n', ""),
        ("math.pi * r**2", "(math.pi\n            * r**2)"),
        ("\n\n\ndef", "\n\n\n\n\ndef"),
    ],
)
def test_comments_docstrings_and_layout_leave_it(fingerprint_of, before, after):
    assert before in CODE
    assert fingerprint_of(CODE.replace(before, after)) == fingerprint_of(CODE)


@pytest.mark.parametrize(
    ("before", "after"),
    [("r**2", "r**3"), ("size = 3", "size = 4"), ("r: float", "r: int"), ("math.pi * r**2", "r**2 * math.pi"),
     ("import math\n", "import math\nimport cmath\n"), ("def area", "def surface")],
)  # fmt: skip
def test_code_changes_it(fingerprint_of, before, after):
    assert before in CODE
    assert fingerprint_of(CODE.replace(before, after)) != fingerprint_of(CODE)


def test_a_string_that_is_no_docstring_counts(fingerprint_of):
    code = 'def f():\n    x = 1\n    return "a"\n'
    assert fingerprint_of(code) != fingerprint_of(code.replace('"a"', '"b"'))


def test_a_body_that_is_a_docstring_alone(fingerprint_of):
    assert fingerprint_of('class E(Exception):\n    """Why."""\n') == fingerprint_of(
        "class E(Exception):\n    pass\n"
    )


def test_a_package_covers_its_modules(fingerprint_of):
    assert fingerprint_of(CODE, "shapes") != fingerprint_of(CODE.replace("r**2", "r**3"), "shapes")


def test_the_order_of_names_does_not_matter():
    a, b = "ptq_dynamics.training.schedule", "ptq_dynamics.training.step"
    assert provenance.fingerprint(a, b) == provenance.fingerprint(b, a) != provenance.fingerprint(a)


def test_a_module_that_is_not_there():
    with pytest.raises(ModuleNotFoundError):
        provenance.fingerprint("ptq_dynamics.nothing")


def test_versions_and_hardware():
    versions = provenance.versions()
    assert {"python", "ptq-dynamics", "torch", "transformers", "numpy"} <= versions.keys()
    assert not any("+" in v for v in versions.values())  # the same on a CPU and a CUDA build
    hardware = provenance.hardware()
    assert hardware["cores"] >= 1 and hardware["memory_gib"] > 0 and hardware["processor"]


def test_commit_tells_a_changed_file(tmp_path):
    assert provenance.commit(tmp_path) == "unknown"

    def git(*args):
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *args], cwd=tmp_path, check=True)

    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-q", "-m", "one")
    clean = provenance.commit(tmp_path)
    assert len(clean) == 12
    (tmp_path / "a").write_text("2")
    assert provenance.commit(tmp_path) == clean + "-dirty"
