from __future__ import annotations

import importlib.util
import sys
import types

import pytest


@pytest.fixture
def presets(monkeypatch):
    """`polyturn.config.presets`, or a stand-in with its signature in a checkout that lacks it."""
    if importlib.util.find_spec("polyturn.config.presets") is not None:
        return

    def resolve_loss(loss, options, *, fixed_length, default_correction):
        values = {
            "ratio_level": "token",
            "clip_rule": "two_sided",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "aggregation": "fixed",
            "fixed_length": fixed_length,
            "sampler_correction": default_correction,
            "sampler_level": "token",
        }
        return options.model_copy(update={key: value for key, value in values.items() if getattr(options, key) is None})

    module = types.ModuleType("polyturn.config.presets")
    module.resolve_loss = resolve_loss
    monkeypatch.setitem(sys.modules, "polyturn.config.presets", module)
