"""Integers: error bounds, real byte counts, packing, gradients."""

from __future__ import annotations

import pytest
import torch

from kvdata.edits.quantization import dequantize, fake_quantize, quantize, quantized_bytes
from kvdata.errors import InvalidRequest


def values(*shape: int, dtype: torch.dtype = torch.float32, offset: float = 0.0) -> torch.Tensor:
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(0)) + offset).to(dtype)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("width", "group"), [(64, 64), (64, 16), (70, 32), (6, 64)])
@pytest.mark.parametrize("offset", [0.0, 40.0])
def test_errors_are_at_most_half_a_step(bits, width, group, offset):
    x = values(2, 5, width, offset=offset)
    found = dequantize(quantize(x, bits, group))
    assert found.shape == x.shape
    for start in range(0, width, group):
        part, got = x[..., start : start + group], found[..., start : start + group]
        low, high = part.aminmax(dim=-1, keepdim=True)
        # float16 rounds the minimum by 2**-12 of itself, the scale by 2**-11: of up to 2**bits - 1 steps.
        bound = 0.5 * (high - low) / (2**bits - 1) + (high - low + low.abs()) * 2**-10
        assert ((part - got).abs() <= bound).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_constants_and_zeros_stay(bits):
    x = torch.tensor([[0.0] * 8, [2.5] * 8, [-7.0] * 8])
    torch.testing.assert_close(dequantize(quantize(x, bits, 8)), x, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("bits", "width", "group"), [(8, 192, 64), (4, 192, 64), (4, 70, 32), (8, 5, 2)])
def test_the_bytes_are_those_of_what_is_kept(bits, width, group):
    kept = quantize(values(7, width), bits, group)
    groups = -(-width // group)
    assert kept.codes.dtype == torch.uint8
    assert kept.codes.shape == (7, width * bits // 8)
    assert kept.nbytes == quantized_bytes(7, width, bits, group) == 7 * (width * bits // 8 + 4 * groups)


def test_two_int4_share_a_byte():
    kept = quantize(torch.tensor([[0.0, 15.0, 3.0, 7.0]]), 4, 4)
    assert kept.codes.tolist() == [[15 << 4, 3 | 7 << 4]]
    assert dequantize(kept).tolist() == [[0.0, 15.0, 3.0, 7.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
def test_training_sees_what_is_kept(bits, dtype):
    x = values(3, 40, dtype=dtype)
    found = fake_quantize(x, bits, 16)
    assert found.dtype == dtype
    assert torch.equal(found, dequantize(quantize(x, bits, 16)))


def test_gradients_pass_straight_through():
    x = values(2, 8).requires_grad_()
    weight = values(2, 8, offset=1.0)
    (fake_quantize(x, 4, 8) * weight).sum().backward()
    assert torch.equal(x.grad, weight)


@pytest.mark.parametrize(
    ("bits", "group", "width", "says"), [(3, 8, 8, "4, 8"), (8, 0, 8, "at least one"), (4, 8, 7, "odd")]
)
def test_what_cannot_be_packed_is_refused(bits, group, width, says):
    for call in (quantize, fake_quantize):
        with pytest.raises(InvalidRequest, match=says):
            call(values(1, width), bits, group)
