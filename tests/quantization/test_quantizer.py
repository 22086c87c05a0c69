from __future__ import annotations

import copy
import functools

import pytest
import torch
from architectures import CONTEXT, FAMILIES, LAYERS, VOCABULARY
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, OPTConfig

from ptq_dynamics.core.errors import UserError
from ptq_dynamics.quantization.gptq import gptq
from ptq_dynamics.quantization.grid import round_to_nearest
from ptq_dynamics.quantization.quantizer import (
    Batch,
    block_linears,
    decoder_blocks,
    embed,
    quantize,
    quantize_block,
    restore,
    snapshot,
)
from ptq_dynamics.quantization.spec import QuantSpec


@functools.cache
def _built(family: str) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(FAMILIES[family][0]()).eval()


def model_of(family: str = "gpt_neox", dtype: torch.dtype = torch.float32) -> nn.Module:
    return copy.deepcopy(_built(family)).to(dtype)


def tokens(sequences: int = 12, length: int = CONTEXT, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCABULARY, (sequences, length), generator=torch.Generator().manual_seed(seed))


def ragged(side: str) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Padded ids, mask, and the sequences without padding."""
    lengths = [CONTEXT, 5, 17, 1, 23, 9, 12]
    ids, mask = tokens(len(lengths), seed=1), torch.zeros(len(lengths), CONTEXT, dtype=torch.int64)
    for row, n in enumerate(lengths):
        mask[row, :n] = 1
        if side == "left":
            mask[row] = mask[row].flip(0)
    return ids, mask, [row[keep.bool()] for row, keep in zip(ids, mask, strict=True)]


def by_whole_passes(model: nn.Module, sequences: list[torch.Tensor], spec: QuantSpec) -> None:
    """What ``quantize`` should do, the slow way: whole forward passes, one sequence at a time, no padding."""
    _, blocks = decoder_blocks(model)
    for block in blocks:
        linears = [m for m in block.modules() if isinstance(m, nn.Linear)]
        inputs: dict[nn.Linear, list[torch.Tensor]] = {m: [] for m in linears}
        hooks = [
            m.register_forward_pre_hook(lambda m, args, to=inputs: to[m].append(args[0].flatten(0, -2)))
            for m in linears
        ]
        with torch.no_grad():
            for sequence in sequences:
                model(input_ids=sequence[None])
        for hook in hooks:
            hook.remove()
        for m in linears:
            x = torch.cat(inputs[m]).double()
            m.weight.data.copy_(gptq(m.weight, 2 / len(x) * x.T @ x, spec)[0].dequantize())


@pytest.mark.parametrize("family", FAMILIES)
def test_only_linears_inside_the_blocks_change(family):
    _, prefix, names = FAMILIES[family]
    model, before = model_of(family), model_of(family).state_dict()
    ids = tokens()
    with torch.no_grad():
        full = model(ids).logits
        result = quantize(model, ids, QuantSpec(bits=8, group_size=20))
        close = model(ids).logits
    expected = {f"{prefix}.{i}.{n}" for i in range(LAYERS) for n in names}
    assert set(result.names) == expected and len(result.names) == len(expected)
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == {f"{n}.weight" for n in expected}
    assert type(model) is type(_built(family))
    assert (close - full).norm() < 0.02 * full.norm()
    assert result.parameters == sum(before[f"{n}.weight"].numel() for n in expected)
    delta = torch.cat([(model.state_dict()[k] - before[k]).flatten() for k in changed])
    assert result.weight_error == pytest.approx(delta.norm().item(), rel=1e-5)


@pytest.mark.parametrize("true_sequential", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_whole_forward_passes(family, true_sequential):
    spec = QuantSpec(bits=3, group_size=16, precision="float64", true_sequential=true_sequential)
    ours, theirs = model_of(family), model_of(family)
    ids = tokens()
    quantize(ours, ids, spec, batch_size=5)
    if true_sequential:
        # one linear at a time, each after everything before it: shared inputs make no difference
        _, blocks = decoder_blocks(theirs)
        for name in [f"{i}.{n}" for i in range(LAYERS) for n in FAMILIES[family][2]]:
            linear, xs = blocks.get_submodule(name), []
            hook = linear.register_forward_pre_hook(lambda _, args, xs=xs: xs.append(args[0].flatten(0, 1)))
            with torch.no_grad():
                theirs(ids)
            hook.remove()
            x = xs[0].double()
            linear.weight.data.copy_(gptq(linear.weight, 2 / len(x) * x.T @ x, spec)[0].dequantize())
    else:
        by_whole_passes(theirs, list(ids), spec)
    for (name, a), b in zip(block_linears(ours).items(), block_linears(theirs).values(), strict=True):
        # float32 activations differ by rounding from pass to pass, which may flip a code
        assert torch.isclose(a.weight, b.weight, rtol=1e-4, atol=1e-6).float().mean() > 0.99, name


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_calibration_equals_the_sequences_one_by_one(family, side):
    spec = QuantSpec(bits=3, group_size=16, precision="float64")
    ids, mask, sequences = ragged(side)
    exact = family == "gpt_neox"  # the others' norms compute in float32, whatever the model's dtype
    dtype = torch.float64 if exact else torch.float32
    theirs = model_of(family, dtype)
    by_whole_passes(theirs, sequences, spec)
    for batch_size in (1, 3, 8):
        ours = model_of(family, dtype)
        quantize(ours, ids, spec, attention_mask=mask, batch_size=batch_size)
        for (name, a), b in zip(block_linears(ours).items(), block_linears(theirs).values(), strict=True):
            same = torch.isclose(a.weight, b.weight, rtol=1e-4, atol=1e-6).float().mean()
            assert same == 1 if exact else same > 0.98, (name, batch_size)


def test_what_stands_at_padding_does_not_matter():
    ids, mask, _ = ragged("left")
    other = torch.where(mask.bool(), ids, (ids + 31) % VOCABULARY)
    models = [model_of("llama"), model_of("llama")]
    for model, x in zip(models, (ids, other), strict=True):
        quantize(model, x, QuantSpec(bits=3, group_size=16), attention_mask=mask)
    for a, b in zip(*(snapshot(m).values() for m in models), strict=True):
        assert torch.equal(a, b)


def test_nan_at_padding_does_not_reach_the_next_block():
    # as from attention kernels that divide by the weight of no key at all
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, hidden, keep):
            return (self.linear(hidden).masked_fill(~keep[..., None], torch.nan),)

    torch.manual_seed(0)
    keep = torch.tensor([[False, False, True, True], [True, True, True, True]])
    hidden = torch.randn(2, 4, 8)
    batches = [Batch(rows=slice(0, 2), keep=keep, arguments=[((keep,), {})])]
    (report,) = quantize_block(Block(), hidden, batches, 0, QuantSpec(bits=4), name="block")
    assert report.name == "block.linear"
    assert (hidden[~keep] == 0).all() and torch.isfinite(hidden).all() and hidden[keep].all()


def test_layers_that_flatten_their_inputs_take_padding_too():
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=VOCABULARY, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=CONTEXT, word_embed_proj_dim=32,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).double().eval()
    theirs = copy.deepcopy(model)
    ids, mask, sequences = ragged("right")
    spec = QuantSpec(bits=3, group_size=16, precision="float64")
    quantize(model, ids, spec, attention_mask=mask)
    by_whole_passes(theirs, sequences, spec)
    for a, b in zip(snapshot(model).values(), snapshot(theirs).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batch_size_does_not_matter(dtype):
    ids = tokens(16)
    weights, errors = [], []
    for batch_size in (1, 8, None):
        model = model_of("gpt_neox", dtype)
        result = quantize(model, ids, QuantSpec(bits=4, group_size=16), batch_size=batch_size)
        weights.append(torch.cat([w.flatten() for w in snapshot(model).values()]))
        errors.append([layer.reconstruction_error for layer in result.layers])
    for w, e in zip(weights[1:], errors[1:], strict=True):
        assert torch.isclose(w, weights[0], rtol=1e-4, atol=1e-7).float().mean() >= 0.999
        assert e == pytest.approx(errors[0], rel=1e-3)


def test_reported_errors_are_those_of_the_written_weights():
    ids = tokens()
    model = model_of("olmo2", torch.bfloat16)
    original = copy.deepcopy(model)
    result = quantize(model, ids, QuantSpec(bits=4, group_size=16))
    xs: dict[str, torch.Tensor] = {}
    for name, linear in block_linears(original).items():
        linear.register_forward_pre_hook(
            lambda _, args, n=name: xs.update({n: args[0].flatten(0, 1).double()})
        )
    with torch.no_grad():
        original(ids)
    for layer in result.layers:
        assert block_linears(model)[layer.name].weight.dtype == torch.bfloat16
        w = block_linears(original)[layer.name].weight.detach().double()
        delta = block_linears(model)[layer.name].weight.detach().double() - w
        assert layer.weight_error == pytest.approx(delta.norm().item(), rel=1e-9)
        assert layer.relative_weight_error == pytest.approx((delta.norm() / w.norm()).item(), rel=1e-9)
        if ".0." in layer.name:  # the first block's inputs are those of the original model
            x = xs[layer.name]
            error = ((x @ delta.T).norm() / (x @ w.T).norm()).item() ** 2
            assert layer.reconstruction_error == pytest.approx(error, rel=2e-2)
            assert layer.damping == 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_to_nearest_needs_no_calibration(dtype):
    model, original = model_of("llama", dtype), model_of("llama", dtype)
    spec = QuantSpec(method="rtn", bits=3, group_size=20, symmetric=False)
    result = quantize(model, None, spec)
    assert result.names == tuple(block_linears(model))
    for layer in result.layers:
        w = block_linears(original)[layer.name].weight
        assert torch.equal(
            block_linears(model)[layer.name].weight, round_to_nearest(w, spec).dequantize().to(dtype)
        )
        assert layer.reconstruction_error is None and 0 < layer.relative_weight_error < 0.5


def test_snapshot_and_restore_give_the_next_bit_width_a_fresh_model():
    model, fresh, ids = model_of(), model_of(), tokens()
    before = snapshot(model)
    for bits in (2, 4):
        result = quantize(model, ids, QuantSpec(bits=bits, group_size=16))
        again = model_of()
        assert [x.weight_error for x in quantize(again, ids, result.spec).layers] == [
            x.weight_error for x in result.layers
        ]
        restore(model, before)
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), fresh.state_dict().values(), strict=True)
    )


def test_one_block_at_a_time_with_the_others_out_of_memory():
    whole, streamed = model_of("smollm3"), model_of("smollm3")
    ids, mask, _ = ragged("left")
    spec = QuantSpec(bits=3, group_size=16)
    result = quantize(whole, ids, spec, attention_mask=mask, batch_size=4)

    prefix, blocks = decoder_blocks(streamed)
    on_disk = [copy.deepcopy(block) for block in blocks]
    blocks.to("meta")
    hidden, batches = embed(streamed, blocks, ids, mask.bool(), 4)
    reports = []
    for index, block in enumerate(on_disk):
        reports += quantize_block(block, hidden, batches, index, spec, name=f"{prefix}.{index}")
    assert tuple(reports) == result.layers
    for index, block in enumerate(on_disk):
        for a, b in zip(block.parameters(), decoder_blocks(whole)[1][index].parameters(), strict=True):
            assert torch.equal(a, b)


def state_of(model: nn.Module) -> list:
    return [
        (m.training, len(m._forward_pre_hooks), len(m._forward_hooks), "forward" in vars(m))
        for m in model.modules()
    ]


def test_leaves_modes_gradients_and_hooks_as_they_were():
    model, ids = model_of(), tokens()
    model.train()
    decoder_blocks(model)[1][1].eval()
    model(ids, labels=ids).loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    before = state_of(model)
    quantize(model, ids, QuantSpec(bits=4, group_size=16))
    assert state_of(model) == before
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(p.requires_grad for p in model.parameters())


def test_error_halfway_names_the_layer_and_leaves_no_hooks():
    model, ids = model_of().train(), tokens()
    decoder_blocks(model)[1][1].post_attention_layernorm.bias.data[3] = torch.inf
    before = state_of(model)
    with pytest.raises(UserError, match=r"^gpt_neox\.layers\.1\.mlp\.dense_h_to_4h: .*not finite"):
        quantize(model, ids, QuantSpec(bits=4, group_size=16))
    assert state_of(model) == before


@pytest.mark.parametrize(
    ("ids", "mask", "says"),
    [
        (None, None, "calibration: GPTQ needs token ids of shape [sequences, length], got none"),
        (tokens(0), None, "calibration: no whole sequence in it (shape (0, 24)); give more text"),
        (tokens(3, 0), None, "calibration: no whole sequence in it (shape (3, 0)); give more text"),
        (tokens(3)[0], None, "calibration: needs integer token ids of shape [sequences, length], got torch.int64 (24,)"),
        (tokens(3).float(), None, "calibration: needs integer token ids"),
        (tokens(3).clone().fill_(VOCABULARY), None, "calibration: token id 97 is outside the model's vocabulary of 97"),
        (tokens(3).clone().fill_(-1), None, "calibration: token id -1 is outside"),
        (tokens(3, CONTEXT + 1), None, "calibration: sequences of 25 tokens, but the model's context is 24"),
        (tokens(3), torch.ones(3, 5), "attention_mask: shape (3, 5) differs from the ids' (3, 24)"),
        (tokens(3), torch.eye(3, CONTEXT) * torch.tensor([[1], [0], [1]]), "attention_mask: sequence 1 is all padding"),
    ],
)  # fmt: skip
def test_bad_calibration_is_one_line_and_changes_nothing(ids, mask, says):
    model = model_of()
    before = snapshot(model)
    with pytest.raises(UserError) as e:
        quantize(model, ids, QuantSpec(), attention_mask=mask)
    assert says in str(e.value) and "\n" not in str(e.value)
    assert all(torch.equal(a, b) for a, b in zip(snapshot(model).values(), before.values(), strict=True))


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_bad_models_are_one_line_and_change_nothing(method):
    spec = QuantSpec(method=method, group_size=16)
    model = model_of()
    decoder_blocks(model)[1][1].mlp.dense_4h_to_h.weight.data[0, 0] = torch.nan
    before = snapshot(model)
    with pytest.raises(UserError, match=r"^gpt_neox\.layers\.1\.mlp\.dense_4h_to_h: weights are not finite"):
        quantize(model, tokens(), spec)
    assert all(
        torch.equal(
            a,
            b,
        )
        for a, b in zip(list(snapshot(model).values())[:-1], list(before.values())[:-1], strict=True)
    )

    # GPT-2 of transformers has no nn.Linear inside its blocks
    gpt2 = AutoModelForCausalLM.from_config(
        GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    )
    with pytest.raises(UserError, match=r"^GPT2LMHeadModel: no list of blocks with linear layers"):
        quantize(gpt2, tokens(), spec)
    with pytest.raises(UserError, match="batch_size: must be at least 1, got 0"):
        quantize(model_of(), tokens(), QuantSpec(), batch_size=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", FAMILIES)
def test_cuda_agrees(family):
    ids, mask, _ = ragged("left")
    spec = QuantSpec(bits=4, group_size=16)
    here, there = model_of(family), model_of(family).cuda()
    ours = quantize(here, ids, spec, attention_mask=mask)
    theirs = quantize(there, ids, spec, attention_mask=mask)
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        assert b.reconstruction_error == pytest.approx(a.reconstruction_error, rel=0.05)
