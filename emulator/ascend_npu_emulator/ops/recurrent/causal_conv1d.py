"""Reference for vllm-ascend's kernel of the causal convolution before GatedDeltaNet.

The convolution keeps a state per request.
"""

import torch

from ascend_npu_emulator.ops.checks import FLOATS, check, check_dtype, check_rank

_OP = "npu_causal_conv1d_custom"
_PREFILL, _UPDATE = 0, 1
_CHANNELS = 16  # the number of channels is a multiple of this


def npu_causal_conv1d_custom(
    output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_state: torch.Tensor,
    bias_opt: torch.Tensor | None,
    query_start_loc_opt: torch.Tensor | None,
    cache_indices_opt: torch.Tensor | None,
    initial_state_mode_opt: torch.Tensor | None,
    num_accepted_tokens_opt: torch.Tensor | None,
    activation_mode: int,
    pad_slot_id: int,
    run_mode: int,
) -> torch.Tensor:
    """Convolve each channel of each sequence with ``width`` taps per channel, into ``output``.

    The last tap belongs to the current token. The inputs before a sequence's first token come from
    the sequence's row of ``conv_state``. The first ``width - 1`` places of the row then receive the
    last inputs of state and sequence together. Products and sums are float32, silu follows if
    ``activation_mode`` is 1, and the result is rounded once. (The kernel's source is in vllm-ascend
    0.23.0's wheel:
    causal_conv1d.h, causal_conv1d_fn_tasks.h.)

    Args:
        output, x: [tokens, channels]. Rows outside all sequences, and of sequences with the row
            ``pad_slot_id``, are not written.
        weight: [width, channels], width 2 to 4.
        conv_state: [rows, state_len, channels], written in place.
        query_start_loc_opt: [sequences + 1], first token of each. Update mode with one token per
            sequence ignores it: token i is sequence i.
        cache_indices_opt: row of each sequence in ``conv_state``; only the first column is used.
            None: sequence i has row i.
        initial_state_mode_opt: for prefill (``run_mode`` 0): whether each sequence has a state; a
            sequence without a state begins with zeros. In an update (``run_mode`` 1) all have a
            state.
        num_accepted_tokens_opt: for an update with draft tokens: number of tokens accepted in each
            sequence's last update. The state begins (number - 1) places further on, and then
            receives the last inputs of the accepted and all new tokens, if they fit.
    """
    check_rank(_OP, "conv_state", conv_state, 3)
    check(
        conv_state.is_contiguous(),
        _OP,
        "conv_state",
        f"strides {conv_state.stride()} must be contiguous: it is written in place",
    )
    return convolve(
        _OP, output, x, weight, conv_state, bias_opt, query_start_loc_opt, cache_indices_opt, initial_state_mode_opt,
        num_accepted_tokens_opt, activation_mode, pad_slot_id, run_mode,
    )  # fmt: skip


def convolve(
    op: str,
    output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_state: torch.Tensor,
    bias_opt: torch.Tensor | None,
    query_start_loc_opt: torch.Tensor | None,
    cache_indices_opt: torch.Tensor | None,
    initial_state_mode_opt: torch.Tensor | None,
    num_accepted_tokens_opt: torch.Tensor | None,
    activation_mode: int,
    pad_slot_id: int,
    run_mode: int,
) -> torch.Tensor:
    """Compute npu_causal_conv1d_custom for the operator `op`, with a state of any strides."""
    check_dtype(op, "x", x, FLOATS)
    check_rank(op, "x", x, 2)
    check_rank(op, "weight", weight, 2)
    check_rank(op, "conv_state", conv_state, 3)
    width, channels = weight.shape
    check(2 <= width <= 4, op, "weight", f"width {width} must be 2, 3 or 4")
    check(
        channels % _CHANNELS == 0, op, "x", f"{channels} channels must be a multiple of {_CHANNELS}"
    )
    for name, tensor in (("x", x), ("conv_state", conv_state)):
        check(
            tensor.shape[-1] == channels,
            op,
            name,
            f"last dimension {tensor.shape[-1]} must equal weight's {channels}",
        )
    for name, tensor in (("output", output), ("weight", weight), ("conv_state", conv_state)):
        check(tensor.dtype == x.dtype, op, name, f"dtype {tensor.dtype} must equal x's {x.dtype}")
    check(
        output.shape == x.shape and output.is_contiguous(),
        op,
        "output",
        f"must be contiguous and have x's shape {tuple(x.shape)}",
    )
    check(
        conv_state.shape[1] >= width - 1,
        op,
        "conv_state",
        f"{conv_state.shape[1]} places are too few for width {width}",
    )
    check(run_mode in (_PREFILL, _UPDATE), op, "run_mode", f"{run_mode} is not 0 or 1")
    check(activation_mode in (0, 1), op, "activation_mode", f"{activation_mode} is not 0 or 1")
    with_drafts = num_accepted_tokens_opt is not None
    check(
        not with_drafts or (run_mode == _UPDATE and width == 4),
        op,
        "num_accepted_tokens_opt",
        "must be given for updates (run_mode 1) of width 4 only",
    )
    rows = (
        cache_indices_opt
        if cache_indices_opt is None or cache_indices_opt.dim() == 1
        else cache_indices_opt[:, 0]
    )
    if run_mode == _UPDATE:
        check(
            initial_state_mode_opt is None,
            op,
            "initial_state_mode_opt",
            "must be given for prefill (run_mode 0) only",
        )
        sequences = x.shape[0] if query_start_loc_opt is None else query_start_loc_opt.shape[0] - 1
        if sequences == x.shape[0] and not with_drafts:
            _update(op, output, x, weight, conv_state, bias_opt, rows, activation_mode, pad_slot_id)
            return output
    check(
        query_start_loc_opt is not None,
        op,
        "query_start_loc_opt",
        "must be given: x has the tokens of several sequences",
    )
    assert query_start_loc_opt is not None
    bounds = (
        list(range(x.shape[0] + 1))
        if query_start_loc_opt.shape[0] == x.shape[0] + 1 and with_drafts
        else query_start_loc_opt.tolist()
    )
    check(
        rows is None or rows.shape[0] == len(bounds) - 1,
        op,
        "cache_indices_opt",
        f"one row per sequence must be given, {len(bounds) - 1} in all",
    )
    places = range(len(bounds) - 1) if rows is None else rows.tolist()
    if run_mode == _UPDATE:
        has_state = [True] * len(places)
    else:
        has_state = (
            [False] * len(places)
            if initial_state_mode_opt is None
            else initial_state_mode_opt.bool().tolist()
        )
    for sequence, (place, begins) in enumerate(zip(places, has_state, strict=True)):
        first, last = bounds[sequence], bounds[sequence + 1]
        if first >= last or place == pad_slot_id or not 0 <= place < conv_state.shape[0]:
            continue
        row = conv_state[place]
        offset = (
            0 if num_accepted_tokens_opt is None else int(num_accepted_tokens_opt[sequence]) - 1
        )
        offset = min(max(offset, 0), row.shape[0] - (width - 1))
        state = row[offset : offset + width - 1]
        inputs = torch.cat((state if begins else torch.zeros_like(state), x[first:last]))
        windows = inputs.unfold(0, width, 1).transpose(1, 2)  # [tokens, width, channels]
        output[first:last] = _convolve(windows, weight, bias_opt, activation_mode).to(output.dtype)
        kept = (
            inputs[1:]
            if with_drafts and last - first + width - 2 <= row.shape[0]
            else inputs[-(width - 1) :]
        )
        row[: kept.shape[0]] = kept
    return output


def _update(
    op: str,
    output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_state: torch.Tensor,
    bias: torch.Tensor | None,
    rows: torch.Tensor | None,
    activation_mode: int,
    pad_slot_id: int,
) -> None:
    """Convolve one token per sequence, without reads on the host, so that graphs can capture it."""
    width = weight.shape[0]
    rows = torch.arange(x.shape[0], device=x.device) if rows is None else rows.long()
    check(
        rows.shape[0] == x.shape[0],
        op,
        "cache_indices_opt",
        f"{rows.shape[0]} rows must be {x.shape[0]}, one per sequence",
    )
    written = ((rows != pad_slot_id) & (rows >= 0) & (rows < conv_state.shape[0])).view(-1, 1)
    rows = rows.clamp(0, conv_state.shape[0] - 1)
    before = conv_state[rows, : width - 1]
    windows = torch.cat((before, x.unsqueeze(1)), 1)
    convolved = _convolve(windows, weight, bias, activation_mode).to(output.dtype)
    output.copy_(torch.where(written, convolved, output))
    # Padding repeats the write of the first sequence, because two values for one place would race.
    sequence = torch.arange(rows.shape[0], device=rows.device)
    source = torch.where(written.flatten(), sequence, written.flatten().int().argmax())
    conv_state[rows[source], : width - 1] = torch.where(
        written.unsqueeze(-1), windows[:, 1:], before
    )[source]


def _convolve(
    windows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation_mode: int
) -> torch.Tensor:
    """Multiply ``windows`` [tokens, width, channels] by the taps, in float32."""
    total = (windows.float() * weight.float()).sum(1)
    if bias is not None:
        total = total + bias.float()
    return total * torch.sigmoid(total) if activation_mode else total
