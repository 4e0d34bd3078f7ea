from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from parts.patience import PATIENCE_S
from polyturn.advantages import ESTIMATORS, Estimator, build_estimator
from polyturn.advantages.turn_rtg import TurnRtg
from polyturn.errors import ConfigError

USER_MODULE = """
from __future__ import annotations

from dataclasses import dataclass
from polyturn.advantages import GroupAdvantages

@dataclass(frozen=True, kw_only=True)
class Halved:
    factor: float
    def __call__(self, groups):
        return [GroupAdvantages(per_turn=(None,) * len(group.trajectories)) for group in groups]

class NotCallable:
    pass

class Unresolvable:
    def __init__(self, depth: Missing = 1) -> None:
        self.depth = depth
    def __call__(self, groups):
        return []
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_credit.py").write_text(USER_MODULE)
    (tmp_path / "my_broken_credit.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_credit"
    for name in ("my_credit", "my_broken_credit"):
        sys.modules.pop(name, None)


def test_credit_needs_no_torch() -> None:
    code = "import sys, polyturn.advantages; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_name_builds_with_its_defaults(name: str) -> None:
    assert isinstance(build_estimator(name), Estimator)


def test_options_become_fields() -> None:
    built = build_estimator("turn_rtg", {"gamma": 1, "baseline": "zero_padded"})
    assert built == TurnRtg(gamma=1.0, baseline="zero_padded")
    assert isinstance(built.gamma, float)


def test_a_class_of_the_users_own(user_module: str) -> None:
    assert build_estimator(f"{user_module}:Halved", {"factor": 2}).factor == 2.0
    assert build_estimator(f"{user_module}:Unresolvable", {"depth": 3}).depth == 3


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("turn_rgt", {}, r"advantage='turn_rgt' is unknown; did you mean turn_rtg\?"),
        ("turn_rtg", {"gama": 1.0}, r"advantage_options.gama is no option of turn_rtg; did you mean gamma\?"),
        ("turn_rtg", {"gamma": "high"}, r"gamma='high' doesn't fit turn_rtg: .*number"),
        ("turn_rtg", {"gamma": True}, r"gamma=True doesn't fit"),
        ("turn_rtg", {"baseline": "zero"}, r"'survivors' or 'zero_padded'"),
        ("grpo", {"normalise_then_sum": 1}, r"normalise_then_sum=1 doesn't fit grpo: .*boolean"),
        ("grpo", {"normalise_then_sum": True, "weights": {"a": "b"}}, r"weights=.* doesn't fit grpo"),
        ("turn_rtg", {"gamma": 2.0}, r"gamma=2.0 is no discount"),
        ("my_credit:Halvd", {}, r"my_credit has no Halvd; did you mean Halved\?"),
        ("my_credit:Halved", {}, r"missing a required (keyword-only )?argument: 'factor'"),
        ("my_credit:Halved", {"factor": "x"}, r"factor='x' doesn't fit"),
        ("my_credit:NotCallable", {}, r"can't be called; give its class a method __call__"),
        ("my_credit:NotCallable", {"a": 1}, r"a is no option of my_credit:NotCallable; it has none"),
        ("my_absent_credit:Halved", {}, r"my_absent_credit:Halved: no module named my_absent_credit"),
        ("my_broken_credit:Halved", {}, r"importing my_broken_credit raised ZeroDivisionError at .*my_broken_credit\.py:1"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(user_module: str, name: str, options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        build_estimator(name, options)
    assert "\n" not in str(caught.value)
