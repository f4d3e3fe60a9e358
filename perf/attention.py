"""Which attention is fastest with T5's bias, forward and backward, at the shapes of a packed step.

48 lanes of 8 texts, 200 positions, 16 heads of 64, bf16. The bias is the same for all texts
(`broadcast`) or carries each text's padding mask (`with padding`). Milliseconds are for the 24
layers of one lane's encoder.

Run: python perf/attention.py        (needs a CUDA card)
"""

from __future__ import annotations

import json
import statistics
from datetime import date
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

LANES, TEXTS, POSITIONS, HEADS, WIDTH, LAYERS = 48, 8, 200, 16, 64, 24


def median_ms(step, repeats: int = 8) -> float:
    """Median over calls timed on the device."""
    times = []
    for i in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def fused(backend: SDPBackend, with_bias: bool = True):
    """One of torch's kernels."""

    def attend(q, k, v, bias, lengths):
        with sdpa_kernel(backend):
            mask = bias.expand(len(q), -1, -1, -1) if with_bias else None
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)

    return attend


def plain(q, k, v, bias, lengths):
    """As written in the paper; compiled."""
    scores = q @ k.transpose(2, 3) + bias
    return torch.softmax(scores.float(), -1).to(q.dtype) @ v


def flexible(**blocks):
    """Flex attention with the bias looked up in the kernel; compiled."""

    def attend(q, k, v, bias, lengths):
        def score(value, b, h, i, j):
            return torch.where(j < lengths[b], value + bias[0, h, i, j], float("-inf"))

        return flex_attention(q, k, v, score_mod=score, scale=1.0, kernel_options=blocks)

    return attend


def measure(attend, padded: bool, is_compiled: bool) -> dict[str, float]:
    """Forward alone, and forward with backward."""
    torch._dynamo.reset()
    rows = LANES * TEXTS
    packed = torch.randn(rows, POSITIONS, 3, HEADS, WIDTH, device="cuda").bfloat16()
    q, k, v = (t.detach().requires_grad_() for t in packed.permute(2, 0, 3, 1, 4))
    bias = 0.1 * torch.randn(1, HEADS, POSITIONS, POSITIONS, device="cuda").bfloat16()
    lengths = torch.randint(POSITIONS - 10, POSITIONS + 1, (rows,), device="cuda")
    if padded:
        seen = (torch.arange(POSITIONS, device="cuda") < lengths[:, None])[:, None, None]
        bias = torch.where(seen, bias, -1e4).bfloat16().contiguous()
    run = torch.compile(attend, dynamic=False) if is_compiled else attend
    gradient = torch.randn_like(run(q, k, v, bias, lengths))
    with torch.no_grad():
        forward = median_ms(lambda: run(q, k, v, bias, lengths))
    both = median_ms(lambda: torch.autograd.grad(run(q, k, v, bias, lengths), (q, k, v), gradient))
    return {"forward_ms": forward * LAYERS / LANES, "both_ms": both * LAYERS / LANES}


def main() -> None:
    """All candidates, to perf/results/attention-gpu.json."""
    flex = {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 64,
            "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 32, "bwd_num_warps": 4, "bwd_num_stages": 2}  # fmt: skip
    candidates = {
        "flash, no bias (not T5)": (fused(SDPBackend.FLASH_ATTENTION, False), False, False),
        "cuDNN, no bias (not T5)": (fused(SDPBackend.CUDNN_ATTENTION, False), False, False),
        "cuDNN, broadcast": (fused(SDPBackend.CUDNN_ATTENTION), False, False),
        "cuDNN, with padding": (fused(SDPBackend.CUDNN_ATTENTION), True, False),
        "memory-efficient, broadcast": (fused(SDPBackend.EFFICIENT_ATTENTION), False, False),
        "memory-efficient, with padding": (fused(SDPBackend.EFFICIENT_ATTENTION), True, False),
        "plain, compiled, with padding": (plain, True, True),
        "flex, best blocks, with padding": (flexible(**flex), False, True),
    }
    results = {name: measure(*candidate) for name, candidate in candidates.items()}
    record = {
        "command": "python perf/attention.py",
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__},
        "results": results,
    }
    path = Path(__file__).parent / "results" / "attention-gpu.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    for name, found in results.items():
        print(f"{name:32} {found['forward_ms']:8.3f} {found['both_ms']:8.3f} ms")


if __name__ == "__main__":
    main()
