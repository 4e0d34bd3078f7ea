"""The names of all metrics, each with its meaning. `metrics.jsonl` holds any of them, the stable line the first few.

A share is between 0 and 1; `num_` counts over one step; `_s` is seconds, `_bytes` bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

STABLE_LINE: tuple[str, ...] = ("step", "reward", "loss", "tokens_per_s", "policy_age", "success", "grad_norm")
"""What the line that every step prints holds, in this order. Scripts read it: add at the end, never change the rest."""

METRICS: Mapping[str, str] = {
    "step": "Training step, from 1; 0 is the evaluation before the first.",
    "reward": "Mean total reward of the step's valid trajectories: turn rewards plus outcome.",
    "reward_std": "Standard deviation of the total reward over the step's valid trajectories.",
    "success": "Share of the valid trajectories that the environment calls solved.",
    "turns_per_trajectory": "Mean turns of a trajectory.",
    "completion_tokens_per_trajectory": "Mean sampled tokens of a trajectory.",
    "truncated_share": "Share of trajectories that a limit ended, not the model or the environment.",
    "dropped_share": "Share of the planned trajectories that were lost to faults or broken samples.",
    "num_faults": "Trajectories with a fault, which are masked.",
    "num_dropped_samples": "Training samples dropped because they broke an invariant.",
    "num_dropped_groups": "Groups left with fewer than two valid siblings.",
    "num_zero_advantage_groups": "Groups that teach nothing, because every advantage in them is 0.",
    "num_masked_truncated": "Trajectories that a limit ended and rollout.mask_truncated kept out of the batch.",
    "num_rows": "Packed rows of the batch.",
    "num_shared_tokens": "Tokens that samples have in common and that the rows hold once.",
    "num_tokens": "Tokens of the batch, context included.",
    "num_trained_tokens": "Tokens of the batch under the loss mask.",
    "loss": "The loss that was minimized, mean over the optimizer steps of the step.",
    "kl": "Mean KL estimate to the reference per trained token.",
    "grad_norm": "Norm of the gradient before clipping, mean over the optimizer steps of the step.",
    "learning_rate": "Learning rate of the last optimizer step.",
    "entropy": "Mean entropy of the policy at the trained tokens, in nats.",
    "logprob": "Mean trainer log-probability of the trained tokens.",
    "ratio": "Mean importance ratio of the trained tokens; 1 on the first optimizer step of a batch.",
    "clipped_low": "Share of trained tokens whose ratio was clipped from below.",
    "clipped_high": "Share of trained tokens whose ratio was clipped from above.",
    "sampler_weight": "Mean weight between trainer and engine probabilities.",
    "sampler_weight_max": "Largest weight between trainer and engine probabilities.",
    "sampler_masked": "Share of trained tokens that the sampler correction masked.",
    "mismatch": "Mean |trainer_logprobs - engine_logprobs| over trained tokens.",
    "mismatch_max": "Largest |trainer_logprobs - engine_logprobs| of a trained token.",
    "mismatch_kl": "k3 estimate of the KL between engine and trainer over trained tokens.",
    "policy_version": "Weight pushes so far.",
    "policy_age": "Trainer version minus the version that sampled, mean over trained tokens.",
    "optimizer_step": "Optimizer steps so far.",
    "tokens_per_s": "Tokens of the batch per second of the whole step.",
    "peak_memory_bytes": "Most device memory held at once since the run began.",
}

FAMILIES: Mapping[str, str] = {
    "push/": "Seconds of the push after the step, by its phases, such as push/checksums_s; see docs/weight_sync.md.",
    "time/": "Seconds of the step during which a part was under way, such as time/rollout_s.",
    "outcome/": "Mean of one outcome component over the trajectories that have it.",
    "environment/": "Mean over trajectories of what the environment counted, such as environment/malformed.",
    "checkpoint/": "Of checkpoints since the last step: seconds until one was in its tier, and failures.",
    "fault/": "Trajectories with one kind of fault.",
    "engine/": "What vLLM found at its start: bytes of weights, of its pool of keys and values, tokens that fit there.",
    "eval/": "The metric after the slash, over held-out episodes; eval/success is the headline.",
    "eval_greedy/": "As eval/, sampled greedily.",
}


def meaning(name: str) -> str | None:
    """What a metric means; None for a name that nobody listed.

    >>> meaning("policy_version")
    'Weight pushes so far.'
    """
    if name in METRICS:
        return METRICS[name]
    return next((words for family, words in FAMILIES.items() if name.startswith(family) and name != family), None)
