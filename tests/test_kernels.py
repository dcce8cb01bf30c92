"""The elementwise kernels: each CPU set against transformers' formulas, and their Triton form against the twins."""

import math

import pytest
import torch
from triton_interpreter import DEVICE
from triton_interpreter import kernels as interpreted

from nano_sgl import kernels, native

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal up to two roundings of the dtype (the interpreter truncates when it stores bfloat16)."""
    assert got.dtype == want.dtype and got.shape == want.shape
    torch.testing.assert_close(
        got.cpu().double(), want.cpu().double(), rtol=3 * torch.finfo(want.dtype).eps, atol=3 * torch.finfo(want.dtype).eps
    )


def hf_rms_norm(x, weight, eps):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)


def hf_rope(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_is_that_of_transformers(kernel_set, dtype):
    torch.manual_seed(0)
    for tokens, size in ((1, 576), (16, 576), (3, 100), (0, 64)):
        x, weight = torch.randn(tokens, size).to(dtype), torch.randn(size).to(dtype)
        got = kernels.rms_norm(x, weight, 1e-5)
        torch.testing.assert_close(got, hf_rms_norm(x, weight, 1e-5), rtol=4 * torch.finfo(dtype).eps, atol=0)
        close(interpreted.rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-5, backend="triton"), got)


@pytest.mark.parametrize("dtype", DTYPES)
def test_head_norms_of_a_strided_view_with_a_weight_row_per_head(kernel_set, dtype):
    torch.manual_seed(0)
    qkv, weight = torch.randn(5, 9, 40).to(dtype), torch.randn(6, 40).to(dtype)
    view = qkv[:, 1:7]
    got = kernels.rms_norm(view, weight, 1e-6)
    close(got, torch.stack([hf_rms_norm(view[:, h], weight[h], 1e-6) for h in range(6)], 1))
    close(interpreted.rms_norm(view.to(DEVICE), weight.to(DEVICE), 1e-6, backend="triton"), got)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(kernel_set, dtype):
    torch.manual_seed(0)
    x, residual, weight = torch.randn(7, 96).to(dtype), torch.randn(7, 96).to(dtype), torch.randn(96).to(dtype)
    kept = x.clone(), residual.clone()
    normed, total = kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    close(normed, hf_rms_norm(x + residual, weight, 1e-5))
    assert torch.equal(x, kept[0]) and torch.equal(residual, kept[1])
    for got, want in zip(
        interpreted.add_rms_norm(x.to(DEVICE), residual.to(DEVICE), weight.to(DEVICE), 1e-5, backend="triton"), (normed, total)
    ):
        close(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim, rotary", [(16, 16), (64, 64), (80, 32), (24, 8)])
def test_rope_on_a_strided_view_and_a_part_of_the_head(kernel_set, dtype, dim, rotary):
    torch.manual_seed(0)
    qkv = torch.randn(6, 7, dim).to(dtype)
    angle = torch.outer(torch.arange(50.0), 10000.0 ** -(torch.arange(rotary // 2) / (rotary // 2)))
    table = torch.cat((angle.cos(), angle.sin()), -1)
    positions = torch.tensor([0, 3, 4, 49, 3, 17])
    cs = kernels.rope_gather(table, positions, dtype)
    want = qkv.clone()
    cos, sin = (torch.cat((x, x), -1).to(dtype)[:, None] for x in (angle[positions].cos(), angle[positions].sin()))
    want[:, :5, :rotary] = hf_rope(qkv[:, :5, :rotary], cos, sin)  # two heads stay: they are the values of a fused projection
    twin, triton = qkv.clone(), qkv.clone().to(DEVICE)
    kernels.rope_(twin[:, :5], cs)
    interpreted.rope_(triton[:, :5], cs.to(DEVICE), backend="triton")
    for got in (twin, triton):
        torch.testing.assert_close(got.cpu().double(), want.double(), rtol=0, atol=12 * torch.finfo(dtype).eps)
        assert torch.equal(got[:, 5:].cpu(), qkv[:, 5:]) and torch.equal(got[..., rotary:].cpu(), qkv[..., rotary:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_store_kv_writes_its_slots_and_no_others(kernel_set, dtype):
    torch.manual_seed(0)
    qkv = torch.randn(5, 9, 24).to(dtype)
    slots = torch.tensor([29, 3, 7, 1, 12])
    for module, device, backend in ((kernels, "cpu", kernel_set), (interpreted, DEVICE, "triton")):
        caches = torch.randn(2, 30, 3, 24, device=device).to(dtype)
        want = caches.clone()
        for i in range(5):
            want[0, slots[i]], want[1, slots[i]] = qkv[i, 3:6].to(device), qkv[i, 6:9].to(device)
        on = qkv.to(device)
        module.store_kv(on[:, 3:6], on[:, 6:9], caches[0], caches[1], slots.to(device), backend=backend)
        assert torch.equal(caches, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_of_16_bits_is_read_and_written_as_torch_does(kernel_set, dtype):
    """Sums of random pairs, of every number with nothing, and of its double: rounding, overflow, subnormal numbers, NaN."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    if dtype == torch.bfloat16:  # the CPU's own instructions take subnormal bfloat16 for zero
        x = x[~((x != 0) & (x.abs() < torch.finfo(dtype).tiny))]
    x = x[: len(x) // 500 * 500].view(500, -1)
    weight = torch.ones(x.shape[1], dtype=dtype)
    for other in (torch.zeros_like(x), x, x.flatten()[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0))].view_as(x)):
        got, want = kernels.add_rms_norm(x, other, weight, 1e-5)[1], other + x
        if dtype == torch.bfloat16:
            got, want = (sums.where(sums.abs() >= torch.finfo(dtype).tiny, sums * 0) for sums in (got, want))
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(kernel_set, dtype):
    torch.manual_seed(0)
    for tokens, size in ((4, 30), (1, 1536), (0, 8)):
        gate_up = torch.randn(tokens, 2 * size).to(dtype)
        kept = gate_up.clone()
        got = kernels.silu_mul(gate_up)
        close(got, torch.nn.functional.silu(gate_up[:, :size]) * gate_up[:, size:])
        assert torch.equal(gate_up, kept)
        close(interpreted.silu_mul(gate_up.to(DEVICE), backend="triton"), got)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_of_any_number_of_tokens(kernel_set, dtype, monkeypatch):
    monkeypatch.setattr(native, "few", lambda *args: native.ANY)  # also where torch is faster
    torch.manual_seed(0)
    shapes = [(1, 960, 576), (2, 33, 64), (3, 1, 40), (4, 100, 96), (7, 64, 32), (16, 50, 1536), (17, 96, 64), (32, 70, 128), (40, 9, 64), (0, 4, 32),
              (33, 64, 96), (64, 47, 32), (100, 80, 160), (513, 70, 64), (1060, 32, 48), (5, 33, 385), (15, 31, 9), (23, 18, 777), (521, 65, 1159)]
    for tokens, outputs, size in shapes:
        x, weight, bias = torch.randn(tokens, size + 8).to(dtype)[:, :size], torch.randn(outputs, size).to(dtype), torch.randn(outputs).to(dtype)
        for b in (None, bias):
            want = torch.nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
            got = kernels.linear(x, weight, b)
            assert got.dtype == dtype
            torch.testing.assert_close(got.double(), want, rtol=3 * torch.finfo(dtype).eps, atol=25 * size**0.5 * torch.finfo(dtype).eps)
            full = kernels.linear(x, weight, b, dtype=torch.float32)
            assert full.dtype == torch.float32
            torch.testing.assert_close(full.to(dtype).double(), want, rtol=3 * torch.finfo(dtype).eps, atol=25 * size**0.5 * torch.finfo(dtype).eps)


def test_a_product_of_mixed_or_scattered_operands_is_torchs(kernel_set):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 64).bfloat16(), torch.randn(10, 64).bfloat16(), torch.randn(20).bfloat16()
    want = torch.nn.functional.linear(x, weight, bias[::2])
    for w, b in ((weight, bias[::2]), (weight.T.contiguous().T, bias[::2]), (torch.cat((weight, weight), 1)[:, :64], bias[::2].clone())):
        torch.testing.assert_close(kernels.linear(x, w, b), want, rtol=2e-2, atol=2e-2)
    unaligned = torch.empty(641, dtype=torch.bfloat16)[1:].view(10, 64).copy_(weight)
    torch.testing.assert_close(kernels.linear(x, unaligned, bias[::2].clone()), want, rtol=2e-2, atol=2e-2)
    with pytest.raises(RuntimeError, match="dtype"):
        kernels.linear(x, weight.float())


def test_a_backend_that_cannot_run_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="backend 'cuda' is not known"):
        kernels.silu_mul(torch.zeros(1, 4), backend="cuda")
    native.use("off")
    try:
        with pytest.raises(native.BuildError, match="switched off"):
            kernels.silu_mul(torch.zeros(1, 4), backend="cpp")
    finally:
        native.use("native")
    monkeypatch.setattr(kernels, "triton", None)
    with pytest.raises(ImportError, match="triton is not installed"):
        kernels.silu_mul(torch.zeros(1, 4), backend="triton")
    assert math.isfinite(kernels.silu_mul(torch.ones(1, 4)).sum())
