"""Log-probabilities and entropy from hidden states, without ever holding the logits of all tokens.

The LM head runs over chunks of tokens. The forward pass keeps one number a token (the log of the normaliser); the backward
pass computes a chunk's logits again and turns them into gradients at once. That is one more product with the head than plain
autograd, in return for memory that does not grow with tokens x vocabulary. Sums are in float32, whatever the weights are.

Shapes: N trained tokens, C tokens of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_GPU_CHUNK_BYTES = 1 << 30
"""Of one chunk's logits in float32. For each chunk the backward pass reads and writes the head's whole gradient in float32, as
many bytes as the logits of H tokens: few, large chunks are faster."""
_CHUNK_BYTES = 256 << 20
"""Elsewhere, where memory is scarce and products are slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """What a model does to its logits besides the product with the head: some scale them, some squash them."""

    scale: float = 1.0
    """Logits are multiplied by it."""
    softcap: float | None = None
    """Then bounded: softcap x tanh(logits / softcap)."""


def head_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor,
    *,
    bias_V: Tensor | None = None,
    shape: HeadShape | None = None,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`logprobs_N`, with gradient to hidden states, weight and bias, and `entropy_N`, without; both float32.

    `logprobs_N[n]` is of `targets_N[n]` under logits divided by `temperature_N[n]`. With a float32 weight the head is computed
    in float32, whatever the hidden states are.
    """
    chunk_bytes = chunk_bytes or (_GPU_CHUNK_BYTES if weight_VH.is_cuda else _CHUNK_BYTES)
    chunk = max(1, chunk_bytes // (4 * weight_VH.shape[0]))
    logprobs_N, entropy_N = _Head.apply(hidden_NH, weight_VH, bias_V, targets_N, temperature_N, shape or HeadShape(), chunk)  # type: ignore[no-untyped-call]
    return logprobs_N, entropy_N


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        temperature_N: Tensor,
        shape: HeadShape,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs_N = torch.empty(len(hidden_NH), dtype=_sums_in(weight_VH), device=hidden_NH.device)
        entropy_N, normaliser_N = torch.empty_like(logprobs_N), torch.empty_like(logprobs_N)
        inverse_N = temperature_N.to(logprobs_N.dtype).reciprocal()
        summarise = _fused(_summary, hidden_NH.device)
        for part in _chunks(len(hidden_NH), chunk):
            product_CV = _product(hidden_NH[part].to(weight_VH.dtype), weight_VH)
            numbers = summarise(product_CV, bias_V, inverse_N[part], targets_N[part], shape.scale, shape.softcap)
            logprobs_N[part], entropy_N[part], normaliser_N[part] = numbers
            del product_CV  # or it is there until the next chunk's has taken its own memory
        context.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, inverse_N, normaliser_N)
        context.shape, context.chunk = shape, chunk
        context.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(context: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, inverse_N, normaliser_N = context.saved_tensors
        needs_hidden, needs_weight, needs_bias = context.needs_input_grad[:3]
        shape: HeadShape = context.shape
        grad_hidden_NH = torch.empty_like(hidden_NH) if needs_hidden else None
        # Many chunks add up here: in the weight's own bfloat16 most of a small addend would be lost.
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=_sums_in(weight_VH)) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=_sums_in(weight_VH)) if bias_V is not None and needs_bias else None
        differentiate = _fused(_grad_product, hidden_NH.device)
        for part in _chunks(len(hidden_NH), context.chunk):
            states_CH = hidden_NH[part].to(weight_VH.dtype)
            numbers = (bias_V, inverse_N[part], targets_N[part], normaliser_N[part], grad_N[part])
            kept = _sums_in(weight_VH) if grad_bias_V is not None else weight_VH.dtype
            grad_CV = differentiate(_product(states_CH, weight_VH), *numbers, shape.scale, shape.softcap, kept)
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
                grad_CV = grad_CV.to(weight_VH.dtype)
            if grad_hidden_NH is not None:
                grad_hidden_NH[part] = grad_CV @ weight_VH
            if grad_weight_VH is not None:
                _add_product(grad_weight_VH, grad_CV, states_CH)
            del grad_CV
        return (
            grad_hidden_NH,
            None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype),
            None if grad_bias_V is None or bias_V is None else grad_bias_V.to(bias_V.dtype),
            *([None] * 4),
        )


def _scaled(
    product_CV: Tensor, bias_V: Tensor | None, inverse_C: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Logits over temperature, and the slope of the soft cap where there is one.

    `inverse_C` is one over the temperature: C divisions and C x V products are less than C x V divisions.
    """
    logits_CV = product_CV if bias_V is None else product_CV + bias_V
    if scale != 1.0:
        logits_CV = logits_CV * scale
    if softcap is None:
        return logits_CV * inverse_C[:, None], None
    squashed_CV = torch.tanh(logits_CV / softcap)
    return squashed_CV * softcap * inverse_C[:, None], 1 - squashed_CV * squashed_CV


def _summary(
    product_CV: Tensor,
    bias_V: Tensor | None,
    inverse_C: Tensor,
    targets_C: Tensor,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of the targets, entropy, and log of the normaliser, `[C]` each, given hidden states x head."""
    scaled_CV, _ = _scaled(product_CV, bias_V, inverse_C, scale, softcap)
    top_C = scaled_CV.amax(-1)
    # Two sums of the same numbers: fused, the logits are read twice in all, where log-sum-exp and an entropy read them thrice.
    parts_CV = torch.exp(scaled_CV - top_C[:, None])
    sum_C = parts_CV.sum(-1)
    # H = log Z - E[logit]; a logit of -inf has no part in it, and 0 x inf would be nan.
    expected_C = torch.where(parts_CV > 0, parts_CV * scaled_CV, 0.0).sum(-1) / sum_C
    normaliser_C = top_C + torch.log(sum_C)
    logprobs_C = scaled_CV.gather(-1, targets_C[:, None])[:, 0] - normaliser_C
    return logprobs_C, normaliser_C - expected_C, normaliser_C


def _grad_product(
    product_CV: Tensor,
    bias_V: Tensor | None,
    inverse_C: Tensor,
    targets_C: Tensor,
    normaliser_C: Tensor,
    grad_C: Tensor,
    scale: float,
    softcap: float | None,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient with respect to hidden states x head (and bias), `[C, V]`: grad x (1[target] - p) x what follows."""
    scaled_CV, slope_CV = _scaled(product_CV, bias_V, inverse_C, scale, softcap)
    factor_C = grad_C * (scale * inverse_C)
    is_target_CV = torch.arange(product_CV.shape[-1], device=product_CV.device) == targets_C[:, None]
    grad_CV = (is_target_CV.to(scaled_CV.dtype) - torch.exp(scaled_CV - normaliser_C[:, None])) * factor_C[:, None]
    return (grad_CV if slope_CV is None else grad_CV * slope_CV).to(dtype)


_COMPILED: dict[Callable[..., Any], Callable[..., Any]] = {}


def _fused(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """`function`, as one pass over the logits on a GPU instead of one for each of its lines."""
    if device.type != "cuda":
        return function
    if function not in _COMPILED:
        _COMPILED[function] = _for_any_count(torch.compile(function))
    return _COMPILED[function]


def _for_any_count(run: Callable[..., Any]) -> Callable[..., Any]:
    """Compile for chunks of any number of tokens at once, wherever in a row they lie.

    Not `dynamic`: the vocabulary stays a constant then, and an index into the logits costs no division by a variable.
    """

    def fused(product_CV: Tensor, bias_V: Tensor | None, *numbers: Any) -> Any:
        # What is compiled for a slice that begins in the middle is compiled again for one that begins a row: no slices, then.
        whole = [number.clone() if isinstance(number, Tensor) else number for number in numbers]
        for tensor in (product_CV, *whole):
            if isinstance(tensor, Tensor):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return run(product_CV, bias_V, *whole)

    return fused


def _product(hidden_CH: Tensor, weight_VH: Tensor) -> Tensor:
    """Hidden x weight^T in float32; on a GPU the product of bfloat16 matrices is not rounded to bfloat16 on its way."""
    if hidden_CH.dtype == _sums_in(hidden_CH):
        return hidden_CH @ weight_VH.T
    if hidden_CH.is_cuda:
        return torch.mm(hidden_CH, weight_VH.T, out_dtype=torch.float32)
    return hidden_CH.float() @ weight_VH.T.float()


def _add_product(total_VH: Tensor, inner_CV: Tensor, hidden_CH: Tensor) -> None:
    """Add inner^T x hidden to `total_VH`, in float32."""
    if inner_CV.dtype == _sums_in(inner_CV):
        total_VH.addmm_(inner_CV.T, hidden_CH)
    elif inner_CV.is_cuda:
        torch.addmm(total_VH, inner_CV.T, hidden_CH, out_dtype=torch.float32, out=total_VH)
    else:
        total_VH.addmm_(inner_CV.T.float(), hidden_CH.float())


def _sums_in(weight: Tensor) -> torch.dtype:
    """float32, or the float64 of a gradient check."""
    return torch.promote_types(weight.dtype, torch.float32)


def _chunks(count: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, count)) for start in range(0, count, chunk)]
