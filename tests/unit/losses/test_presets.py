from __future__ import annotations

import pytest

from polyturn.config.presets import LOSS_PRESETS, resolve_loss
from polyturn.config.schema import LossOptions
from polyturn.errors import ConfigError


def resolved(preset: str = "grpo", correction: str = "none", **given: object) -> LossOptions:
    return resolve_loss(preset, LossOptions.model_validate(given), fixed_length=100, default_correction=correction)


@pytest.mark.parametrize(
    ("preset", "level", "rule", "clip_low", "clip_high", "aggregation"),
    [
        ("grpo", "token", "two_sided", 0.2, 0.2, "fixed"),
        ("dapo", "token", "two_sided", 0.2, 0.28, "fixed"),
        ("dr_grpo", "token", "two_sided", 0.2, 0.2, "fixed"),
        ("bnpo", "token", "two_sided", 0.2, 0.2, "token"),
        ("gspo", "sequence", "two_sided", 3e-4, 4e-4, "fixed"),
        ("cispo", "token", "cispo", None, 5.0, "fixed"),
        ("sapo", "token", "sapo", None, None, "fixed"),
    ],
)
def test_what_the_presets_set(
    preset: str, level: str, rule: str, clip_low: object, clip_high: object, aggregation: str
) -> None:
    options = resolved(preset)
    assert (options.ratio_level, options.clip_rule, options.aggregation) == (level, rule, aggregation)
    assert (options.clip_low, options.clip_high, options.delta) == (clip_low, clip_high, None)
    sapo = (1.0, 1.05) if preset == "sapo" else (None, None)
    assert (options.sapo_temperature_positive, options.sapo_temperature_negative) == sapo
    assert (options.fixed_length, options.beta, options.kl_times_ratio) == (100, 0.0, True)


def test_the_table_above_is_complete() -> None:
    assert sorted(LOSS_PRESETS) == ["bnpo", "cispo", "dapo", "dr_grpo", "grpo", "gspo", "sapo"]


@pytest.mark.parametrize(
    ("correction", "low", "high"), [("none", None, None), ("tis", None, 2.0), ("mis", 0.0, 2.0), ("icepop", 0.5, 5.0)]
)
def test_sampler_defaults(correction: str, low: float | None, high: float | None) -> None:
    for options in (resolved(correction=correction), resolved(correction="none", sampler_correction=correction)):
        assert options.sampler_correction == correction
        assert (options.sampler_level, options.sampler_low, options.sampler_high) == ("token", low, high)


def test_what_is_given_wins() -> None:
    given = {
        "ratio_level": "turn",
        "clip_low": 0.1,
        "clip_high": 0.5,
        "delta": 4.0,
        "aggregation": "sequence",
        "fixed_length": 7,
        "sampler_correction": "mis",
        "sampler_level": "turn",
        "sampler_low": 0.25,
        "sampler_high": 3.0,
        "beta": 0.05,
        "kl_times_ratio": False,
    }
    options = resolved("bnpo", "tis", **given).model_dump(exclude_none=True)
    assert options == {**given, "clip_rule": "two_sided"}


def test_another_clip_rule_does_not_inherit_the_presets_numbers() -> None:
    assert resolved("grpo", clip_rule="cispo").clip_high == 5.0
    assert resolved("grpo", clip_rule="cispo").clip_low is None
    assert resolved("gspo", clip_rule="sapo").sapo_temperature_negative == 1.05
    assert resolved("cispo", clip_rule="two_sided").clip_high == 0.2


@pytest.mark.parametrize("preset", LOSS_PRESETS)
@pytest.mark.parametrize("correction", ["none", "tis", "mis", "icepop"])
def test_resolving_twice_changes_nothing(preset: str, correction: str) -> None:
    once = resolved(preset, correction)
    for other in ("none", "tis"):
        assert resolve_loss(preset, once, fixed_length=9, default_correction=other) == once


@pytest.mark.parametrize(
    ("preset", "given", "words"),
    [
        ("grpoo", {}, r"algorithm.loss='grpoo' is unknown; did you mean grpo\?"),
        ("xyz", {}, r"valid: bnpo, cispo, dapo, dr_grpo, grpo, gspo, sapo"),
        ("cispo", {"delta": 4.0}, r"delta=4.0 has no effect with clip_rule cispo; remove it, or choose clip_rule two_sided"),
        ("sapo", {"delta": 4.0}, r"delta=4.0 has no effect with clip_rule sapo"),
        ("sapo", {"clip_high": 0.2}, r"clip_high=0.2 has no effect with clip_rule sapo; .* two_sided or cispo"),
        ("cispo", {"clip_low": 0.2}, r"clip_low=0.2 has no effect"),
        ("grpo", {"sapo_temperature_positive": 1.0}, r"sapo_temperature_positive=1.0 has no effect .* clip_rule sapo"),
        ("grpo", {"clip_rule": "cispo", "delta": 4.0}, r"delta=4.0 has no effect"),
        ("cispo", {"clip_high": 0.2}, r"clip_high=0.2 with clip_rule cispo caps the weight itself"),
        ("dapo", {"delta": 1.28}, r"delta=1.28 is not above 1 \+ clip_high = 1.28"),
        ("grpo", {"sampler_correction": "mis", "sampler_low": 3.0}, r"sampler_low=3.0 is above sampler_high=2.0"),
        ("grpo", {"sampler_low": 3.0, "sampler_high": 2.0}, r"sampler_low=3.0 is above sampler_high=2.0"),
        (
            "grpo",
            {"sampler_correction": "tis", "sampler_low": 0.5},
            r"sampler_low=0.5 has no effect with .* tis",
        ),
        ("grpo", {"sampler_correction": "tis", "sampler_high": 0.5}, r"a weight of 1, .* is outside"),
        ("grpo", {"sampler_correction": "icepop", "sampler_low": 1.5}, r"a weight of 1, .* is outside"),
    ],
)
def test_contradictions_are_refused(preset: str, given: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolved(preset, **given)


def test_an_unknown_default_correction_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'tiss' is unknown; did you mean tis\?"):
        resolved(correction="tiss")


def test_bounds_wait_for_an_engine_that_calls_for_a_correction() -> None:
    assert resolved(correction="none", sampler_high=3.0).sampler_high == 3.0
    assert resolved(correction="tis", sampler_high=3.0).sampler_high == 3.0
