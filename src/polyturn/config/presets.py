"""Named losses: what a preset sets, and `resolve_loss`, which fills every option and refuses what contradicts itself.

A preset is nothing but values for the axes of `LossOptions`; code after this point never sees its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyturn.config.schema import LossOptions
from polyturn.errors import ConfigError, nearest

# `fixed` is the aggregation of every preset but bnpo, which is nothing else than its token mean. The papers of dapo and cispo
# average over tokens, those of grpo, gspo and sapo over trajectories; both bias turn-level credit (`aggregation` brings them
# back for a comparison).
_PPO = {"ratio_level": "token", "clip_rule": "two_sided", "clip_low": 0.2, "clip_high": 0.2, "aggregation": "fixed"}
LOSS_PRESETS: Mapping[str, LossOptions] = {
    "grpo": LossOptions.model_validate(_PPO),
    "dapo": LossOptions.model_validate(_PPO | {"clip_high": 0.28}),
    "dr_grpo": LossOptions.model_validate(_PPO),
    "bnpo": LossOptions.model_validate(_PPO | {"aggregation": "token"}),
    # A mean over a whole trajectory hardly moves, hence the small clips.
    "gspo": LossOptions.model_validate(_PPO | {"ratio_level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}),
    # The cap is of the weight itself. 0.2, right for the other rules, would cap every on-policy weight (they are 1) to 0.2:
    # a learning rate five times smaller, and no clipping of anything else.
    "cispo": LossOptions(ratio_level="token", clip_rule="cispo", clip_high=5.0, aggregation="fixed"),
    "sapo": LossOptions(
        ratio_level="token",
        clip_rule="sapo",
        sapo_temperature_positive=1.0,
        sapo_temperature_negative=1.05,
        aggregation="fixed",
    ),
}

# Whose numbers a clip rule gets when the recipe asks for it on top of a preset that has another rule.
_RULE_HOME = {"two_sided": "grpo", "cispo": "cispo", "sapo": "sapo"}
_RULE_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "two_sided": ("clip_low", "clip_high", "delta"),
    "cispo": ("clip_high",),
    "sapo": ("sapo_temperature_positive", "sapo_temperature_negative"),
}
_SAMPLER_BOUNDS: Mapping[str, Mapping[str, float]] = {
    "none": {},
    "tis": {"sampler_high": 2.0},
    "mis": {"sampler_low": 0.0, "sampler_high": 2.0},
    "icepop": {"sampler_low": 0.5, "sampler_high": 5.0},
}


def resolve_loss(loss: str, options: LossOptions, *, fixed_length: int, default_correction: str) -> LossOptions:
    """Every option that the loss uses, filled: from `options` where given, else from the preset, else from its defaults.

    What the chosen axes don't use stays None. Resolving the result once more gives it back. `fixed_length` is the token
    budget of a trajectory, `default_correction` what engine and lag call for. Raises ConfigError for an unknown preset, for
    an option that would have no effect, and for bounds that make no sense.
    """
    preset = LOSS_PRESETS.get(loss)
    if preset is None:
        raise ConfigError(f"algorithm.loss={loss!r} is unknown; {nearest(loss, LOSS_PRESETS)}")
    given = {name: value for name, value in options.model_dump().items() if value is not None}
    filled: dict[str, Any] = {
        "ratio_level": preset.ratio_level,
        "aggregation": preset.aggregation,
        "fixed_length": fixed_length,
        "sampler_correction": default_correction,
        "sampler_level": "token",
        "clip_rule": preset.clip_rule,
    } | given
    rule, correction = filled["clip_rule"], filled["sampler_correction"]
    if correction not in _SAMPLER_BOUNDS:
        raise ConfigError(f"sampler correction {correction!r} is unknown; {nearest(correction, _SAMPLER_BOUNDS)}")
    _refuse_idle_clips(rule, given)
    home = preset if preset.clip_rule == rule else LOSS_PRESETS[_RULE_HOME[rule]]
    clips = {name: getattr(home, name) for name in _RULE_OPTIONS[rule]}
    filled = clips | dict(_SAMPLER_BOUNDS[correction]) | filled
    _refuse_clips(rule, filled)
    _refuse_sampler_bounds(correction, filled)
    return LossOptions.model_validate(filled)


def _refuse_idle_clips(rule: str, given: Mapping[str, Any]) -> None:
    """Refuse a number that the clip rule never reads."""
    for name in sorted({name for names in _RULE_OPTIONS.values() for name in names} - set(_RULE_OPTIONS[rule])):
        if name in given:
            users = [other for other, names in _RULE_OPTIONS.items() if name in names]
            raise ConfigError(
                f"algorithm.loss_options.{name}={given[name]} has no effect with clip_rule {rule}; remove it, or choose "
                f"clip_rule {' or '.join(users)}"
            )


def _refuse_clips(rule: str, filled: Mapping[str, Any]) -> None:
    """Refuse clips that would hold ratios no update has moved yet."""
    if rule == "sapo":
        return
    clip_high: float = filled["clip_high"]
    delta: float | None = filled.get("delta")
    if rule == "cispo" and clip_high < 1:
        raise ConfigError(
            f"algorithm.loss_options.clip_high={clip_high} with clip_rule cispo caps the weight itself, which is 1 on-policy, "
            "so it would only scale the learning rate; give at least 1, usually 5.0"
        )
    if delta is not None and delta <= 1 + clip_high:
        raise ConfigError(
            f"algorithm.loss_options.delta={delta} is not above 1 + clip_high = {1 + clip_high:g}, where positive advantages "
            "are clipped already; give more, usually 2 to 4, or remove it"
        )


def _refuse_sampler_bounds(correction: str, filled: Mapping[str, Any]) -> None:
    """Refuse bounds that are crossed, shut out a weight of 1, or have no effect."""
    low: float | None = filled.get("sampler_low")
    high: float | None = filled.get("sampler_high")
    if low is not None and high is not None and low > high:
        raise ConfigError(f"algorithm.loss_options.sampler_low={low} is above sampler_high={high}; swap them")
    if correction == "none" or high is None:
        return  # left alone: the same recipe may run on an engine that calls for a correction
    if correction == "tis" and low is not None:
        raise ConfigError(
            f"algorithm.loss_options.sampler_low={low} has no effect with sampler_correction tis, which truncates from above "
            "only; remove it, or choose mis or icepop"
        )
    if high < 1 or (low is not None and low > 1):
        raise ConfigError(
            f"algorithm.loss_options.sampler_low={low}, sampler_high={high}: a weight of 1, where trainer and engine agree, is "
            "outside; give bounds around 1"
        )
