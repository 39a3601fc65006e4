"""The loss by noise level, against a loop over tokens."""

import pytest
import torch

from megatron_dllm.metrics import LossCurves, memory_gib
from tests.one_process import one_process


def test_loss_by_level_bin_by_bin():
    generator = torch.Generator().manual_seed(0)
    levels = torch.rand(500, generator=generator) * 0.7  # the highest bins stay empty ...
    levels[:3] = torch.tensor([0.0, 0.5, 1.0])  # ... but for this 1.0, which belongs to the last one
    nll = torch.rand(500, generator=generator) * 9
    curves = LossCurves()
    metric = curves.by_level
    with one_process():
        assert metric.reduce(None) == {}
        for part in (slice(0, 100), slice(100, 100), slice(100, 500)):
            curves.add(nll[part], levels[part], None)
        means = metric.reduce(None)
        assert metric.reduce(None) == {}  # begins anew
    expected = {}
    for i in range(10):
        inside = [x for x, t in zip(nll.tolist(), levels.tolist(), strict=True) if min(int(t * 10), 9) == i]
        if inside:
            name = f"loss by noise level/t {i / 10:.1f}-{(i + 1) / 10:.1f}"
            expected[name] = pytest.approx(sum(inside) / len(inside), rel=1e-6)
    assert means == expected and len(means) == 8


def test_reset_forgets():
    curves = LossCurves()
    curves.add(torch.ones(3), torch.zeros(3), torch.zeros(3))
    curves.reset()
    with one_process():
        assert curves.by_level.reduce(None) == curves.by_place.reduce(None) == {}


def test_loss_by_place_in_the_block():
    curves = LossCurves()
    curves.add(torch.tensor([1.0, 2.0, 4.0, 9.0, 3.0]), None, torch.tensor([0, 3, 3, 40, 31], dtype=torch.int32))
    with one_process():
        title = "loss by place in the block/place "
        assert curves.by_place.reduce(None) == {title + "00": 1.0, title + "03": 3.0, title + "31": 6.0}
        assert curves.by_level.reduce(None) == {}


def test_memory_is_this_process():
    assert 0.01 < memory_gib() < 100
