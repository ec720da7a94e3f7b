"""The example model is the architecture that it says: counts, rotary and causal properties, loss."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from overlap_pass.errors import OptionError
from overlap_pass.profiling.llama import PRESETS, Llama, LlamaConfig, RMSNorm, Rotary, preset

TINY = PRESETS["tiny"]


def count(config: LlamaConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Llama(config).parameters())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # 2·32768·4096 + 8·(2·4096² + 2·4096·1024 + 3·4096·14336 + 2·4096) + 4096, by hand
        ("bench-2b", 268_435_456 + 8 * (33_554_432 + 8_388_608 + 176_160_768 + 8_192) + 4_096),
        # what Meta publishes for Llama 3 8B
        ("llama3-8b", 8_030_261_248),
        # 2·32768·2048 + 16·(2·2048² + 2·2048·512 + 3·2048·8192 + 2·2048) + 2048
        ("bench-1b", 134_217_728 + 16 * (8_388_608 + 2_097_152 + 50_331_648 + 4_096) + 2_048),
    ],
)
def test_presets_have_the_parameters_of_their_architecture(name, expected):
    assert count(preset(name)) == expected


def test_tying_the_head_saves_exactly_one_embedding():
    assert count(TINY) - count(replace(TINY, tied=True)) == TINY.vocab_size * TINY.dim


def test_grouped_query_attention_is_full_attention_with_repeated_key_and_value_heads():
    torch.manual_seed(0)
    grouped = Llama(TINY)
    full = Llama(replace(TINY, kv_heads=TINY.heads))
    weights = grouped.state_dict()
    for name, weight in weights.items():
        if name.endswith((".key.weight", ".value.weight")):
            heads = weight.unflatten(0, (TINY.kv_heads, TINY.head_dim))
            weights[name] = heads.repeat_interleave(TINY.heads // TINY.kv_heads, dim=0).flatten(0, 1)
    full.load_state_dict(weights)
    tokens = torch.randint(TINY.vocab_size, (2, 16))
    torch.testing.assert_close(grouped.logits(tokens), full.logits(tokens))


def rotary() -> Rotary:
    module = Rotary(TINY)
    module.reset_parameters()
    return module


def test_rotary_products_depend_on_the_distance_between_positions_only():
    torch.manual_seed(0)
    query, key = torch.randn(2, TINY.head_dim)
    at_every_position = rotary()(torch.stack((query, key))[None, :, None].expand(1, 2, 64, -1))[0]
    products = at_every_position[0] @ at_every_position[1].T
    for distance in (-9, 0, 1, 17):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-4)
    assert products.diagonal(1)[0] != products.diagonal(17)[0]


def test_rotary_keeps_lengths_and_leaves_position_zero_alone():
    torch.manual_seed(0)
    x = torch.randn(1, 1, 32, TINY.head_dim)
    turned = rotary()(x)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[..., 0, :], x[..., 0, :])


def test_a_later_token_changes_no_earlier_logit():
    torch.manual_seed(0)
    model = Llama(TINY)
    tokens = torch.randint(TINY.vocab_size, (1, 24))
    changed = tokens.clone()
    changed[0, 10] = (tokens[0, 10] + 1) % TINY.vocab_size
    before, after = model.logits(tokens), model.logits(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert all(not torch.equal(before[0, t], after[0, t]) for t in range(10, 24))


def test_norm_gives_unit_mean_square_in_the_dtype_of_its_input():
    x = torch.randn(4, 64, dtype=torch.bfloat16) * 30
    normed = RMSNorm(64, 1e-5).bfloat16()(x)
    assert normed.dtype == torch.bfloat16
    torch.testing.assert_close(normed.float().square().mean(-1), torch.ones(4), rtol=0.02, atol=0)


def test_the_loss_of_a_fresh_model_is_near_that_of_a_uniform_guess_and_fp32():
    torch.manual_seed(0)
    tokens = torch.randint(TINY.vocab_size, (2, 65))
    loss = Llama(TINY).bfloat16()(tokens[:, :-1], tokens[:, 1:])
    assert loss.dtype == torch.float32
    assert abs(loss.item() - math.log(TINY.vocab_size)) < 0.1


def test_a_model_from_the_meta_device_gets_the_same_tables_and_initial_spread():
    with torch.device("meta"):
        model = Llama(TINY)
    model.to_empty(device="cpu").reset_parameters()
    assert torch.equal(model.blocks[1].attention.rotary.cos, rotary().cos)
    assert model.head.weight.std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"heads": 3}, "dim=64 must be an even multiple of heads=3"), ({"kv_heads": 3}, "multiple of kv_heads=3")],
)
def test_a_shape_that_does_not_divide_is_refused(change, message):
    with pytest.raises(OptionError, match=message):
        replace(TINY, **change)


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(OptionError, match="did you mean 'bench-2b'"):
        preset("bench-2")


def test_a_sequence_beyond_the_tables_is_refused():
    tokens = torch.zeros(1, TINY.max_tokens + 1, dtype=torch.int64)
    with pytest.raises(OptionError, match="sequence of 257 tokens is longer than max_tokens=256"):
        Llama(TINY).logits(tokens)
