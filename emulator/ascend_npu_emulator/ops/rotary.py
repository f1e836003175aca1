"""References for the rotary position embeddings."""

from collections.abc import Sequence

import torch

from ascend_npu_emulator.ops.checks import FLOATS, check, check_dtype, check_rank, unsupported

_HALF_OR_PAIRS = ("half", "interleave")


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, neox: bool) -> torch.Tensor:
    """Rotate the last dimension of ``x`` [..., R] by one angle per pair; return float32.

    ``cos`` and ``sin`` are float32 [..., R/2]. With ``neox`` element i is paired with i + R/2,
    otherwise neighbours are paired.
    """
    exact = x.float()
    half = exact.shape[-1] // 2
    first, second = (
        (exact[..., :half], exact[..., half:]) if neox else (exact[..., 0::2], exact[..., 1::2])
    )
    low, high = first * cos - second * sin, second * cos + first * sin
    return torch.cat((low, high), -1) if neox else torch.stack((low, high), -1).flatten(-2)


def _turned(x: torch.Tensor, mode: str) -> torch.Tensor:
    if mode == "half":
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), -1)
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


def _npu_rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool,
) -> None:
    """Rotate ``query`` [T, heads * head_size] and ``key`` [T, kv_heads * head_size] in place.

    ``cos_sin_cache`` [positions, R] has cos in the first half and sin in the second. The first R
    elements of each head are rotated.
    """
    op = "_npu_rotary_embedding"
    check_dtype(op, "positions", positions, (torch.int32, torch.int64))
    rotary_dim = cos_sin_cache.shape[-1]
    check_rank(op, "cos_sin_cache", cos_sin_cache, 2)
    check(
        0 < rotary_dim <= head_size and rotary_dim % 2 == 0,
        op,
        "cos_sin_cache",
        f"last dimension {rotary_dim} must be even and at most head_size={head_size}",
    )
    places = positions.flatten()
    chosen = cos_sin_cache.index_select(0, places).float()
    cos, sin = (part.unsqueeze(1) for part in chosen.chunk(2, -1))
    for name, tensor in (("query", query), ("key", key)):
        check_dtype(op, name, tensor, FLOATS)
        check(
            tensor.dtype == cos_sin_cache.dtype,
            op,
            name,
            f"dtype {tensor.dtype} must equal cos_sin_cache's {cos_sin_cache.dtype}",
        )
        check(
            tensor.is_contiguous(),
            op,
            name,
            f"strides {tensor.stride()} must be contiguous: it is written in place",
        )
        check(
            tensor.shape[0] == places.numel(),
            op,
            name,
            f"{tensor.shape[0]} rows for {places.numel()} positions",
        )
        heads = tensor.view(places.numel(), -1, head_size)
        turning = heads[..., :rotary_dim]
        turning.copy_(rotate(turning, cos, sin, is_neox_style).to(tensor.dtype))


def npu_mrope(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    head_size: int,
    *,
    mrope_section: Sequence[int] | None = None,
    rotary_mode: str | None = "half",
    cache_mode: str | None = "default",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``query`` [T, heads * head_size] and ``key`` [T, kv_heads * head_size], rotated.

    The first R elements of each head are rotated, as by ``_npu_rotary_embedding``. With sections,
    ``positions`` [3, T] has a token's position in time, height and width. Of a head's R/2 angles,
    the first mrope_section[0] use the first position, the next mrope_section[1] the second, and the
    rest the third. Without sections, or with zeros, ``positions`` is [T]. Hardware supports only
    the sections 16, 24, 24.
    """
    op = "npu_mrope"
    section = list(mrope_section or (0, 0, 0))
    check(
        rotary_mode in _HALF_OR_PAIRS,
        op,
        "rotary_mode",
        f"{rotary_mode!r} is not one of {_HALF_OR_PAIRS}",
    )
    if cache_mode != "default":
        raise unsupported(op, "cache_mode", cache_mode)
    check(
        section in ([0, 0, 0], [16, 24, 24]),
        op,
        "mrope_section",
        f"{section} is neither [16, 24, 24] nor [0, 0, 0]",
    )
    check_dtype(op, "positions", positions, (torch.int32, torch.int64))
    check_rank(op, "positions", positions, 2 if any(section) else 1)
    check_rank(op, "cos_sin_cache", cos_sin_cache, 2)
    rotary_dim = cos_sin_cache.shape[-1]
    check(
        0 < rotary_dim <= head_size and rotary_dim % 2 == 0,
        op,
        "cos_sin_cache",
        f"last dimension {rotary_dim} must be even and at most head_size={head_size}",
    )
    cos, sin = cos_sin_cache[positions].float().chunk(2, -1)
    if any(section):
        check(
            positions.shape[0] == 3,
            op,
            "positions",
            f"{positions.shape[0]} rows must be 3: time, height and width",
        )
        check(
            sum(section) == rotary_dim // 2,
            op,
            "mrope_section",
            f"{section} must add up to {rotary_dim // 2} angles",
        )
        cos, sin = (
            torch.cat([part[axis] for axis, part in enumerate(each.split(section, -1))], -1)
            for each in (cos, sin)
        )
    rotated = []
    for name, tensor in (("query", query), ("key", key)):
        check_dtype(op, name, tensor, FLOATS)
        check(
            tensor.dtype == cos_sin_cache.dtype,
            op,
            name,
            f"dtype {tensor.dtype} must equal cos_sin_cache's {cos_sin_cache.dtype}",
        )
        check(tensor.is_contiguous(), op, name, f"strides {tensor.stride()} must be contiguous")
        check(
            tensor.shape[0] == positions.shape[-1],
            op,
            name,
            f"{tensor.shape[0]} rows for {positions.shape[-1]} positions",
        )
        heads = tensor.clone().view(tensor.shape[0], -1, head_size)
        turning = heads[..., :rotary_dim]
        turning.copy_(
            rotate(turning, cos.unsqueeze(1), sin.unsqueeze(1), rotary_mode == "half").to(
                tensor.dtype
            )
        )
        rotated.append(heads.view(tensor.shape))
    return rotated[0], rotated[1]


def npu_rotary_mul(
    input: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return r1 * input + r2 * turned(input).

    The mode "half" turns the halves (x1, x2) into (-x2, x1); "interleave" turns each pair. All
    tensors are 4-dimensional. ``r1`` (cos) and ``r2`` (sin) have the last dimension of ``input``;
    each other dimension is equal to that of ``input`` or 1.
    """
    op = "npu_rotary_mul"
    check(
        rotary_mode in _HALF_OR_PAIRS,
        op,
        "rotary_mode",
        f"{rotary_mode!r} is not one of {_HALF_OR_PAIRS}",
    )
    if rotate is not None:
        raise unsupported(op, "rotate", rotate)
    check_dtype(op, "input", input, FLOATS)
    for name, tensor in (("input", input), ("r1", r1), ("r2", r2)):
        check_rank(op, name, tensor, 4)
    check(input.shape[-1] % 2 == 0, op, "input", f"last dimension {input.shape[-1]} must be even")
    for name, tensor in (("r1", r1), ("r2", r2)):
        fits = all(
            size in (1, whole)
            for size, whole in zip(tensor.shape[:3], input.shape[:3], strict=True)
        )
        check(
            fits and tensor.shape[3] == input.shape[3],
            op,
            name,
            f"shape {tuple(tensor.shape)} does not broadcast over input {tuple(input.shape)}",
        )
    exact = input.float()
    return (r1.float() * exact + r2.float() * _turned(exact, rotary_mode)).to(input.dtype)


def npu_apply_rotary_pos_emb(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: str = "BSND",
    rotary_mode: str = "half",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate ``query`` and ``key`` in place by ``cos`` and ``sin``, and return them.

    ``cos`` and ``sin`` are one head wide. In layout "BSND" they are [B, S, N, D] with cos [B, S, 1,
    D]; in "TND" [T, N, D] with cos [T, 1, D]. A2 hardware supports these layouts and the mode
    "half" only.
    """
    op = "npu_apply_rotary_pos_emb"
    check(
        layout in ("BSND", "TND"),
        op,
        "layout",
        f"{layout!r} is not supported on A2; supported: BSND, TND",
    )
    check(
        rotary_mode == "half",
        op,
        "rotary_mode",
        f"{rotary_mode!r} is not supported on A2; supported: half",
    )
    rank = len(layout)
    for name, tensor in (("query", query), ("key", key), ("cos", cos), ("sin", sin)):
        check_rank(op, name, tensor, rank)
        check_dtype(op, name, tensor, FLOATS)
        check(
            tensor.dtype == query.dtype,
            op,
            name,
            f"dtype {tensor.dtype} must equal query's {query.dtype}",
        )
        check(
            tensor.shape[: rank - 2] == query.shape[: rank - 2],
            op,
            name,
            f"shape {tuple(tensor.shape)} must begin like query's {tuple(query.shape)}",
        )
        check(
            tensor.shape[-1] == query.shape[-1],
            op,
            name,
            f"last dimension must equal query's {query.shape[-1]}",
        )
    check(cos.shape[-2] == 1 and sin.shape[-2] == 1, op, "cos", "cos and sin must have one head")
    for tensor in (query, key):
        exact = tensor.float()
        tensor.copy_((exact * cos.float() + _turned(exact, "half") * sin.float()).to(tensor.dtype))
    return query, key
