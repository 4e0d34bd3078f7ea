"""Invariants 5, 6, 7, 9 and 10 of the design: a check each, and a partner that breaks the code and demands that it fails."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from parts.environments import Colours
from parts.models import gradients, largest_gap, snapshot, tiny_model
from parts.runs import RECIPE, run_python
from parts.samples import alone, loss_options, on_policy, packed, random_samples, trainer_settings
from polyturn.engine.hf import HfEngine
from polyturn.errors import EngineError, WeightSyncError
from polyturn.rendering.renderer import Renderer
from polyturn.rollouts.driver import rollout_groups
from polyturn.rollouts.episode import Limits, Player, Sampling
from polyturn.trainer import forward, trainer as trainer_module
from polyturn.trainer.trainer import Trainer
from polyturn.trajectories.assemble import assemble
from polyturn.types import TrainSample
from polyturn.weight_sync.in_process import InProcessBridge
