"""A trainer's state: every kind of optimizer goes on from it as if nothing had happened."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from numerics.builders import make_batch
from parts.models import tiny_model
from polyturn.checkpoint.files import read_rest, read_state, write_files
from polyturn.checkpoint.tree import split
from polyturn.trainer.random_state import random_state, restore_random_state

