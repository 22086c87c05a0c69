"""params.yaml as one typed object, and the profiles in conf/ that it is composed from."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from ruamel.yaml import YAML

from .core import paths
from .core.config import config_dataclass, load, one_of, read_yaml
from .core.errors import UserError
from .core.files import write_text
from .corpus.build import CorpusConfig
from .curvature.along import CurvatureConfig
from .evaluation.averages import AveragingConfig
from .evaluation.crosscheck import CrosscheckConfig
from .evaluation.downstream import DownstreamConfig
from .evaluation.measure import MeasureConfig
from .evaluation.monitor import MonitorConfig
from .evaluation.variants import OptionsConfig, QuantizersConfig
from .training.loop import Machine
from .training.study import Study

HEAD = "# Composed from conf/base.yaml and conf/{name}.yaml by `ptq-dynamics profile {name}`. Edit freely; every key is checked.\n"


@config_dataclass()
class Params:
    """All of params.yaml."""

    profile: str  # which file of conf/ this was composed from
    workers: Annotated[int, Field(ge=1)]  # members of a study at once, one thread each
    machine: Machine
    corpus: CorpusConfig
    studies: dict[str, Study]
    measure: MeasureConfig
    averaging: AveragingConfig | None = None
    curvature: CurvatureConfig | None = None
    monitor: MonitorConfig | None = None
    quantizers: QuantizersConfig | None = None
    options: OptionsConfig | None = None
    downstream: DownstreamConfig | None = None
    crosscheck: CrosscheckConfig | None = None
    verdicts: bool = True  # False: too small to judge a claim, verdicts read "inconclusive"


def read(path: Path | None = None) -> Params:
    """params.yaml, checked.

    Raises:
        UserError: one line with the file, the key, and the nearest valid key for a misspelling.
    """
    path = path or paths.params_file()
    return load(Params, read_yaml(path), path.name)


def study(params: Params, name: str) -> Study:
    """The study called ``name``; else ``UserError`` with the nearest name."""
    return params.studies[one_of(name, params.studies, "study")]


def compose(name: str) -> str:
    """Text of params.yaml for profile ``name``: conf/base.yaml, with what conf/<name>.yaml sets put over it."""
    folder = paths.conf()
    known = sorted(p.stem for p in folder.glob("*.yaml") if p.stem != "base")
    one_of(name, known, "profile")
    merged = _merge(read_yaml(folder / "base.yaml"), read_yaml(folder / f"{name}.yaml") or {})
    load(Params, merged, f"conf/{name}.yaml over conf/base.yaml")
    out = io.StringIO()
    yaml = YAML()
    yaml.width = 110
    yaml.dump(merged, out)
    return HEAD.format(name=name) + out.getvalue()


def write_profile(name: str) -> Path:
    """Compose params.yaml anew for profile ``name``."""
    text = compose(name)
    write_text(paths.params_file(), text)
    return paths.params_file()


def _merge(base: Any, over: Any) -> Any:
    """Mappings merge key by key; anything else is replaced."""
    if isinstance(base, dict) and isinstance(over, dict):
        return {k: _merge(base[k], over[k]) if k in base and k in over else over.get(k, base.get(k))
                for k in [*base, *(k for k in over if k not in base)]}  # fmt: skip
    return over


def check_all() -> None:
    """Load params.yaml and every profile; raises at the first fault."""
    read()
    for p in sorted(paths.conf().glob("*.yaml")):
        if p.stem != "base":
            try:
                compose(p.stem)
            except UserError as e:
                raise UserError(f"profile {p.stem}: {e}") from None
