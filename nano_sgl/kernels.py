"""Kernels: the elementwise operations of a layer, twice, and what every Triton kernel of the project needs.

Between two matrix products a layer does little arithmetic and moves much memory, and on a GPU each torch operation is a pass
over that memory plus a launch. So each step between products is one kernel:

    residual, x --add_rms_norm--> h --[qkv product]--> q k v --rms_norm--> q k v     (query and key norms, where a model has them)
                                                        |------rope_------> q k v    (q and k together, in place)
                                                        '-----store_kv----> the pool, at the step's slots
    attention (attention.py) --[product]--> x ... gate_up --silu_mul--> [product] --> x

A [product] is `linear`: torch's, or on a CPU, for as many tokens as it is faster at, kernels.cpp's. There a whole step is one call as well
(`Model.forward`): the operations here then only serve what a model does in its own way.

A `QuantizedWeight` is a matrix of bytes: few tokens, whose time is that of reading the weights, take half of bfloat16's. Whole numbers
up to 127 are exact in any float dtype: kernels multiply by them, sum in fp32, and apply a row's factor to the sum. For many tokens the
weights become x's dtype again, and where torch multiplies them they are rounded to it, which adds no more than rounding x has.

Names: T tokens of the step, E hidden size, N heads, D head dim, G kv heads, S slots of the pool, R rotated entries of a head.
A *twin* is the same function in plain torch: the oracle of the tests, and the path where nothing better is. Tensors on a CUDA or
ROCm device take the Triton kernel, those on a CPU kernels.cpp where it can be built (native.py), others the twin;
`backend="triton"`, "cpp" or "torch" forces one.

Invariant: kernel and twin round alike. As in transformers, arithmetic is fp32 inside, a norm is rounded to the model's dtype
before its weight, SiLU before the product, and the rotary factors are in the model's dtype; so the twin of a norm equals
transformers' bit for bit. Token and slot offsets are made in 64 bits: a pool may hold more than 2^31 elements.

Cost: one read and one write of the operands (rope_'s twin: three passes; a norm's: two). It stops holding where a row does not
fit one program (hidden sizes above 64k).

Triton compiles at the first call. `compile_ahead` does it without the device, for the tests and for a cold start; the interpreter
(TRITON_INTERPRET=1 while this module is imported) runs the same kernels in numpy. After: Zhang and Sennrich 2019 (RMSNorm),
Su et al. 2021 (RoPE), Shazeer 2020 (SwiGLU), Jacob et al. 2018 (integer weights), Tillet et al. 2019 (Triton).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from . import native

try:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
except ImportError:  # macOS, Windows, a bare CPU machine: the torch twins carry everything
    triton = tl = None


QUANTIZE_AT_ONCE = 2**22  # elements, so that scratch is small beside any model


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix [N, K] as whole numbers and a factor per row: row n is values[n] * scales[n]. What a checkpoint is read into needs of a
    tensor, it has: `shape`, `nbytes`, `split`, `copy_`."""
    values: torch.Tensor     # [N, K] int8, contiguous; -127 to 127, never -128
    scales: torch.Tensor     # [N] fp32

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def split(self, rows: int | Sequence[int]) -> list[QuantizedWeight]:
        """Views of so many rows each, as a tensor's `split` makes them."""
        return [QuantizedWeight(*part) for part in zip(self.values.split(rows), self.scales.split(rows))]

    def copy_(self, matrix: torch.Tensor) -> QuantizedWeight:
        """Becomes the nearest to a float matrix: each entry within half a scale, the largest of a row at 127 or -127. A row of zeros has the
        scale 1. ValueError for NaN and infinity; some rows may have been overwritten by then."""
        rows = max(QUANTIZE_AT_ONCE // matrix.shape[1], 1)
        for part, values, scales in zip(matrix.split(rows), self.values.split(rows), self.scales.split(rows)):
            part = part.to(self.values.device).float()
            scale = part.abs().amax(1) / 127
            if not scale.isfinite().all():
                raise ValueError("NaN or infinity cannot be quantised to int8")
            scales.copy_(torch.where(scale < torch.finfo(torch.float32).tiny, 1, scale))
            values.copy_((part / scales[:, None]).round_())
        return self


Weight = torch.Tensor | QuantizedWeight


def route(x: torch.Tensor, backend: str | None = None) -> str:
    """What a function given x runs: "triton", "cpp" or "torch". ImportError, BuildError or ValueError where one was asked for that is
    not there, or does not take x."""
    if backend is None:
        if x.is_cuda:
            return "torch" if triton is None else "triton"
        return "torch" if native.library() is None or not native.takes(x) else "cpp"
    if backend not in ("triton", "cpp", "torch"):
        raise ValueError(f"backend {backend!r} is not known: 'triton', 'cpp', 'torch', or None to go by the tensor's device")
    if backend == "triton" and triton is None:
        raise ImportError("backend='triton' was asked for, but the package triton is not installed")
    if backend == "cpp" and native.library() is None:
        raise native.BuildError("backend='cpp' was asked for, but the C++ kernels could not be built (see the log), or are switched off")
    if backend == "cpp" and not native.takes(x):
        raise ValueError(f"backend='cpp' takes no {x.dtype} with strides {x.stride()} on {x.device}")
    return backend


# ---- the operations and their twins ------------------------------------------------------------------------------------------


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, backend: str | None = None) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis. Returns a new tensor of x's shape and dtype.

    x: [T, E] or [T, N, D], rows may be strided. weight: [E], or [N, D], a row per head, so that query and key norms are one call.
    """
    match route(x, backend):
        case "triton":
            return _launch_rms_norm(x, None, weight, eps)[0]
        case "cpp":
            return _call_rms_norm(x, None, weight, eps)[0]
    return F.rms_norm(x, x.shape[-1:], None, eps) * weight


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float,
                 backend: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """residual + x, [T, E] each, and its norm: returns (normed, new residual); mutates nothing."""
    match route(x, backend):
        case "triton":
            return _launch_rms_norm(x, residual, weight, eps)
        case "cpp":
            return _call_rms_norm(x, residual, weight, eps)
    residual = residual + x
    return rms_norm(residual, weight, eps, backend), residual


def rope_gather(cos_sin: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The step's rows of a rotary table, gathered once for all layers: (cos, cos) and (-sin, sin), [2, T, 1, R] dtype.

    cos_sin: [Cmax, R] fp32, cosines of the R/2 frequencies, then their sines. positions: [T] int64. The result is the two factors
    of x * cos + rotate_half(x) * sin.
    """
    cos, sin = cos_sin[positions].chunk(2, -1)  # [T, R/2] fp32
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))).to(dtype).unsqueeze(2)


def rope_(x: torch.Tensor, cs: torch.Tensor, backend: str | None = None) -> torch.Tensor:
    """Rotates the first R entries of every head of x [T, N, D] in place (by halves, as Llama does), and returns x.

    cs: rope_gather's [2, T, 1, R]. Query and key heads rotate alike: pass both as one view of the fused projection.
    """
    match route(x, backend):
        case "triton":
            return _launch_rope(x, cs)
        case "cpp":
            return _call_rope(x, cs)
    part = x[..., : cs.shape[-1]]
    turned = part.roll(cs.shape[-1] // 2, -1)  # before the product below overwrites it
    part.mul_(cs[0]).addcmul_(turned, cs[1])
    return x


def store_kv(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor,
             backend: str | None = None) -> None:
    """Writes k, v [T, G, D] (strided views allowed) into rows `slots` [T] int64 of the caches [S, G, D], which it mutates.

    Of a slot that stands there twice (the padding slot) either value may stay.
    """
    match route(k, backend):
        case "triton":
            return _launch_store_kv(k, v, k_cache, v_cache, slots)
        case "cpp":
            return _call_store_kv(k, v, k_cache, v_cache, slots)
    k_cache.index_copy_(0, slots, k)
    v_cache.index_copy_(0, slots, v)


def silu_mul(gate_up: torch.Tensor, backend: str | None = None) -> torch.Tensor:
    """[T, 2I] -> silu(first half) * second half, [T, I]."""
    match route(gate_up, backend):
        case "triton":
            return _launch_silu_mul(gate_up)
        case "cpp":
            return _call_silu_mul(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, backend: str | None = None,
           dtype: torch.dtype | None = None) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N] of `dtype`, x's unless it is said to be float32. Torch's product, except
    on a CPU for as many tokens as kernels.cpp is faster at, and for quantised weights and at most TRITON_FEW tokens on a GPU."""
    quantised, dtype = isinstance(weight, QuantizedWeight), dtype or x.dtype
    match route(x, backend):
        case "cpp" if 0 < len(x) <= native.few(x.dtype, quantised, x.shape[1]) and (quantised or weight.dtype == x.dtype and weight.is_contiguous()):
            return _call_linear(x, weight, bias, dtype)
        case "triton" if quantised and len(x) <= TRITON_FEW:
            return _launch_linear_int8(x, weight, bias, dtype)
    return F.linear(x, dequantize(weight, x.dtype) if quantised else weight, bias).to(dtype)


def embedding(ids: torch.Tensor, weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """Rows `ids` [T] int64 of weight [V, E]: [T, E] dtype."""
    rows = rows_of(weight, ids)
    return dequantize(rows, dtype) if isinstance(rows, QuantizedWeight) else rows


def rows_of(weight: Weight, ids: torch.Tensor) -> Weight:
    """Rows `ids` [T] int64 of a matrix [N, K]."""
    if isinstance(weight, QuantizedWeight):
        return QuantizedWeight(weight.values[ids], weight.scales[ids])
    return F.embedding(ids, weight)


def dequantize(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The matrix [N, K] in a float dtype: products in fp32, rounded once."""
    return torch.mul(weight.values, weight.scales[:, None], out=torch.empty(weight.shape, dtype=dtype, device=weight.values.device))


# ---- C++ ----------------------------------------------------------------------------------------------------------------------


def _call_rms_norm(x, residual, weight, eps):
    x = x if x.dim() in (2, 3) else x.reshape(-1, x.shape[-1])
    size, heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    out = torch.empty(x.shape, dtype=x.dtype)
    residual = None if residual is None else residual.contiguous()
    total = None if residual is None else torch.empty_like(out)
    native.library().nano_rms_norm(
        x.data_ptr(), residual if residual is None else residual.data_ptr(), weight.data_ptr(), out.data_ptr(),
        total if total is None else total.data_ptr(), len(x) * heads, heads, size, x.stride(0), x.stride(1) if x.dim() == 3 else 0,
        weight.stride(0) if weight.dim() == 2 else 0, eps, torch.get_num_threads(), native.DTYPES[x.dtype])
    return out, total


def _call_rope(x, cs):
    native.library().nano_rope(x.data_ptr(), cs.data_ptr(), len(x), x.shape[1], cs.shape[-1] // 2, x.stride(0), x.stride(1),
                               torch.get_num_threads(), native.DTYPES[x.dtype])
    return x


def _call_store_kv(k, v, k_cache, v_cache, slots):
    size = k.element_size()
    native.library().nano_store_kv(
        k.data_ptr(), v.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), slots.data_ptr(), len(k), k.shape[1], k.stride(0) * size,
        k.stride(1) * size, v.stride(0) * size, v.stride(1) * size, k_cache.stride(0) * size, k.shape[2] * size, torch.get_num_threads())


def _call_linear(x, weight, bias, dtype):
    out = torch.empty((len(x), weight.shape[0]), dtype=dtype)
    bias = None if bias is None else bias.to(x.dtype).contiguous()
    native.library().nano_linear(x.data_ptr(), native_weight(weight, bias), out.data_ptr(), len(x), x.stride(0), dtype == torch.float32,
                                 torch.get_num_threads(), native.DTYPES[x.dtype])
    return out


def native_weight(weight: Weight, bias: torch.Tensor | None) -> native.Weight:
    """Pointers; whoever uses them keeps the tensors. ValueError where rows are not one behind the other."""
    values, scales = (weight.values, weight.scales) if isinstance(weight, QuantizedWeight) else (weight, None)
    if not all(x is None or x.is_contiguous() for x in (values, scales, bias)):
        raise ValueError(f"a weight of shape {tuple(values.shape)} with strides {values.stride()} is not contiguous, as kernels.cpp needs it")
    at = lambda x: None if x is None else x.data_ptr()
    return native.Weight(at(values), at(scales), at(bias), *values.shape)


def _call_silu_mul(gate_up):
    out = torch.empty((len(gate_up), gate_up.shape[1] // 2), dtype=gate_up.dtype)
    native.library().nano_silu_mul(gate_up.data_ptr(), out.data_ptr(), len(out), out.shape[1], gate_up.stride(0), torch.get_num_threads(),
                                   native.DTYPES[out.dtype])
    return out


# ---- Triton ------------------------------------------------------------------------------------------------------------------

if triton is not None:
    jit, cdiv, pow2 = triton.jit, triton.cdiv, triton.next_power_of_2
    # Decorated once more: the interpreter's switch then counts as it stands when this module is imported, not when Triton was
    tile_max, tile_min, tile_sum = jit(tl.max.fn), jit(tl.min.fn), jit(tl.sum.fn)
else:
    cdiv = pow2 = tile_max = tile_min = tile_sum = None

    def jit(kernel=None, **options):
        """Stands in for triton.jit, so that the kernels below are at least defined."""
        return jit if kernel is None else kernel


@jit
def _rms_norm_kernel(x, residual, weight, out, new_residual, eps, size, heads, x_stride, x_head_stride, weight_stride,
                     ADD: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row (token, head) of x; residual, out and new_residual are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    head = row % heads
    i = tl.arange(0, BLOCK)
    inside = i < size
    dtype = x.dtype.element_ty
    value = tl.load(x + row // heads * x_stride + head * x_head_stride + i, inside, 0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * size + i, inside, 0.0).to(tl.float32)
        value = value.to(dtype)
        tl.store(new_residual + row * size + i, value, inside)
        value = value.to(tl.float32)
    scale = 1.0 / tl.sqrt(tile_sum(value * value, 0) / size + eps)
    w = tl.load(weight + head * weight_stride + i, inside, 0.0).to(tl.float32)
    tl.store(out + row * size + i, (value * scale).to(dtype).to(tl.float32) * w, inside)


def _launch_rms_norm(x, residual, weight, eps):
    x = x if x.stride(-1) == 1 and x.dim() in (2, 3) else x.reshape(-1, x.shape[-1])
    size, heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    new_residual = None if residual is None else torch.empty_like(out)
    if out.numel():
        _rms_norm_kernel[(out.numel() // size,)](
            x, residual if residual is None else residual.contiguous(), weight, out, new_residual, eps, size, heads, x.stride(0),
            x.stride(1) if x.dim() == 3 else 0, weight.stride(0) if weight.dim() == 2 else 0, residual is not None, pow2(size),
            num_warps=min(max(pow2(size) // 256, 1), 8))
    return out, new_residual


@jit
def _rope_kernel(x, cs, tokens, heads, x_stride, x_head_stride, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr):
    """One program per token: all heads, both halves of the rotated part."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_R)[None]
    row = cs + token * 2 * HALF + i
    cos = tl.load(row, i < HALF, 0.0).to(tl.float32)
    sin = tl.load(row + (tokens * 2 + 1) * HALF, i < HALF, 0.0).to(tl.float32)  # the second half of the second factor: + sin
    for start in range(0, heads, BLOCK_H):
        head = start + tl.arange(0, BLOCK_H)[:, None]
        inside = (head < heads) & (i < HALF)
        at = x + token * x_stride + head * x_head_stride + i
        low, high = tl.load(at, inside, 0.0).to(tl.float32), tl.load(at + HALF, inside, 0.0).to(tl.float32)
        tl.store(at, low * cos - high * sin, inside)
        tl.store(at + HALF, high * cos + low * sin, inside)


def _launch_rope(x, cs):
    half = cs.shape[-1] // 2
    if len(x):
        _rope_kernel[(len(x),)](x, cs, len(x), x.shape[1], x.stride(0), x.stride(1), half, 16, pow2(half), num_warps=4)
    return x


@jit
def _store_kv_kernel(k, v, k_cache, v_cache, slots, size, dim, k_stride, k_head_stride, v_stride, v_head_stride, cache_stride,
                     BLOCK: tl.constexpr):
    """One program per token; a cache row, size = G * D elements, is contiguous."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    for start in range(0, size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        head, d = i // dim, i % dim
        tl.store(k_cache + slot * cache_stride + i, tl.load(k + token * k_stride + head * k_head_stride + d, i < size), i < size)
        tl.store(v_cache + slot * cache_stride + i, tl.load(v + token * v_stride + head * v_head_stride + d, i < size), i < size)


def _launch_store_kv(k, v, k_cache, v_cache, slots):
    size = k.shape[1] * k.shape[2]
    if len(k):
        _store_kv_kernel[(len(k),)](k, v, k_cache, v_cache, slots, size, k.shape[2], k.stride(0), k.stride(1), v.stride(0),
                                    v.stride(1), k_cache.stride(0), min(pow2(size), 1024), num_warps=4)


@jit
def _silu_mul_kernel(gate_up, out, size, gate_stride, BLOCK: tl.constexpr):
    """One program per token and block of columns."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + token * gate_stride + i, i < size, 0.0).to(tl.float32)
    up = tl.load(gate_up + token * gate_stride + size + i, i < size, 0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(gate_up.dtype.element_ty).to(tl.float32)
    tl.store(out + token * size + i, silu * up, i < size)


def _launch_silu_mul(gate_up):
    size = gate_up.shape[1] // 2
    out = torch.empty((len(gate_up), size), dtype=gate_up.dtype, device=gate_up.device)
    if len(gate_up):
        _silu_mul_kernel[(len(gate_up), cdiv(size, 1024))](gate_up, out, size, gate_up.stride(0), 1024, num_warps=4)
    return out


@jit
def _linear_int8_kernel(x, values, scales, bias, out, tokens, outputs, size, x_stride, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
                        BLOCK_K: tl.constexpr):
    """One program per block of tokens and of outputs; values [outputs, size] and out [tokens, outputs] are contiguous."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows, columns = token < tokens, output < outputs
    i = tl.arange(0, BLOCK_K)
    x += token.to(tl.int64)[:, None] * x_stride + i[None]
    values += output.to(tl.int64)[None] * size + i[:, None]
    acc = tl.full((BLOCK_T, BLOCK_N), 0.0, tl.float32)
    for start in range(0, size, BLOCK_K):
        left = size - start
        a = tl.load(x + start, rows[:, None] & (i < left)[None], 0.0)          # [BLOCK_T, BLOCK_K]
        w = tl.load(values + start, columns[None] & (i < left)[:, None], 0)    # [BLOCK_K, BLOCK_N] int8
        acc = tl.dot(a, w.to(a.dtype), acc, input_precision="ieee")
    acc *= tl.load(scales + output, columns, 0.0)[None]
    if bias is not None:
        acc += tl.load(bias + output, columns, 0.0).to(tl.float32)[None]
    tl.store(out + token.to(tl.int64)[:, None] * outputs + output[None], acc, rows[:, None] & columns[None])


TRITON_FEW = 256  # tokens; by an H200's data sheet, of more this kernel loses more against torch's product than dequantising costs


def _int8_blocks(tokens: int, fp32: bool) -> dict:
    """Decode reads long pieces in many programs; fp32, which tensor cores do not take, multiplies what registers can hold."""
    if tokens <= 16:
        return dict(BLOCK_T=16, BLOCK_N=32, BLOCK_K=32 if fp32 else 256, num_warps=4, num_stages=3)
    return dict(BLOCK_T=64, BLOCK_N=64, BLOCK_K=16 if fp32 else 64, num_warps=4, num_stages=3)


def _launch_linear_int8(x, weight, bias, dtype):
    outputs, size = weight.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty((len(x), outputs), dtype=dtype, device=x.device)
    blocks = _int8_blocks(len(x), x.dtype == torch.float32)
    if len(x):  # programs of one block of outputs stand side by side: they find its weights in the cache
        _linear_int8_kernel[(cdiv(len(x), blocks["BLOCK_T"]), cdiv(outputs, blocks["BLOCK_N"]))](
            x, weight.values, weight.scales, bias, out, len(x), outputs, size, x.stride(0), **blocks)
    return out


# ---- compiling without the device --------------------------------------------------------------------------------------------

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
_TYPES = dict.fromkeys(("eps", "scale", "softcap"), "fp32") | dict.fromkeys(("part", "part_lse"), "*fp32")  # by argument name
_TYPES |= dict.fromkeys(("table", "cols", "base", "items", "item_count", "segment", "seg_first", "shifts"), "*i32")
_TYPES |= dict.fromkeys(("slots", "bits"), "*i64") | {"values": "*i8", "scales": "*fp32"}
_INTS = {"size", "heads", "kv_heads", "head_dim", "dim", "tokens", "outputs"}


def compile_ahead(kernel, target: str, dtype: str, constants: dict, **options):
    """Compiles a kernel for a target of TARGETS, as its first launch would.

    dtype: "bf16", "fp16" or "fp32", of its tensors. constants: its constexpr arguments, and None for tensors left out.
    options: num_warps, num_stages. Returns Triton's compiled kernel: .asm (by stage: ttir, ptx, cubin, amdgcn) and .metadata.
    """
    types = {}
    for name in kernel.arg_names:
        integer = name in _INTS or name.endswith("stride")
        types[name] = "constexpr" if name in constants else _TYPES.get(name, "i32" if integer else "*" + dtype)
    # What the launcher finds out by itself: pointers and strides of real models are multiples of 16
    aligned = {(i,): [["tt.divisibility", 16]] for i, (name, type_) in enumerate(types.items())
               if type_[0] == "*" or name.endswith("stride") or name == "size"}
    return triton.compile(ASTSource(kernel, types, constants, aligned), target=GPUTarget(*TARGETS[target]), options=options)


def compile_linear_int8(target: str, dtype: str, tokens: int, bias: bool):
    """The product of so many tokens with a quantised weight; see compile_ahead."""
    options = _int8_blocks(tokens, dtype == "fp32")
    constants = {name: options.pop(name) for name in ("BLOCK_T", "BLOCK_N", "BLOCK_K")} | ({} if bias else {"bias": None})
    return compile_ahead(_linear_int8_kernel, target, dtype, constants, **options)


def compile_all(target: str, dtype: str, hidden: int = 4096, kv_size: int = 1024, rotary: int = 128) -> dict:
    """This module's kernels for a model's sizes, by name; see compile_ahead."""
    alone = {"residual": None, "new_residual": None, "ADD": False}
    products = {f"linear_int8 {tokens} {'bias' if bias else 'no bias'}": compile_linear_int8(target, dtype, tokens, bias)
                for tokens in (16, 64) for bias in (False, True)}
    return products | {
        "rms_norm": compile_ahead(_rms_norm_kernel, target, dtype, {**alone, "BLOCK": pow2(hidden)}, num_warps=8),
        "add_rms_norm": compile_ahead(_rms_norm_kernel, target, dtype, {"ADD": True, "BLOCK": pow2(hidden)}, num_warps=8),
        "rope": compile_ahead(_rope_kernel, target, dtype, {"HALF": rotary // 2, "BLOCK_H": 16, "BLOCK_R": pow2(rotary // 2)}),
        "store_kv": compile_ahead(_store_kv_kernel, target, dtype, {"BLOCK": min(pow2(kv_size), 1024)}),
        "silu_mul": compile_ahead(_silu_mul_kernel, target, dtype, {"BLOCK": 1024}),
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    state, update, weight = torch.randn(4, 8), torch.randn(4, 8), torch.ones(8)
    normed, state = add_rms_norm(update, state, weight, 1e-6)
    print("add_rms_norm: mean square of each row =", [round(value, 3) for value in normed.square().mean(-1).tolist()])
    angle = torch.outer(torch.arange(16.0), 10000.0 ** -(torch.arange(4) / 4))
    table = torch.cat((angle.cos(), angle.sin()), -1)  # [16, 8]
    print("\nrope_: a query at m and a key at n score by m - n alone (same two vectors, columns n, rows m):")
    query, key = torch.randn(2, 1, 1, 8).expand(2, 6, 1, 8).clone()
    turn = rope_gather(table, torch.arange(6), torch.float32)
    scores = rope_(query, turn)[:, 0] @ rope_(key, turn)[:, 0].T
    print("\n".join(" ".join(f"{score:6.2f}" for score in row) for row in scores.tolist()))
    pool = torch.zeros(2, 8, 1, 2)
    store_kv(torch.ones(3, 1, 2), torch.ones(3, 1, 2), *pool, torch.tensor([6, 2, 3]))
    print("\nstore_kv into slots 6, 2, 3 of 8:", pool[0, :, 0, 0].int().tolist())
    print("silu_mul([1, 2 | 3, 4]) =", [round(x, 3) for x in silu_mul(torch.tensor([[1.0, 2, 3, 4]]))[0].tolist()])
