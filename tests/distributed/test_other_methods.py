"""Methods of a model other than `forward`, between steps: layers gather themselves as in a forward, the root's own
parameters are gathered by `unshard()`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fsdp_passes import fully_shard
from tests.distributed.checks import WAYS, call_of, float_batches
from tests.ranks import RankPool
from tests.training import build, my_share, whole

HERE = "tests.distributed.test_other_methods"
DIM = 6


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(DIM, DIM)  # of the root
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.outward = nn.Linear(DIM, DIM)

    def encode(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inward(x))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        return (self.outward(self.encode(x)) - x).square().mean()

    @torch.no_grad()
    def generate(self, x: Tensor, steps: int) -> Tensor:
        for _ in range(steps):
            x = self.outward(self.encode(x))
        return x


def called_between_steps(way: str) -> None:
    model, reference = build(Autoencoder)
    assert isinstance(reference, Autoencoder)
    fully_shard(model, units=["layers.*"])
    call = call_of(model, way)
    for batch in float_batches(3, 4, DIM):
        (x,) = my_share(batch)
        model.unshard()  # type: ignore[operator]
        torch.testing.assert_close(call.generate(x, 2), reference.generate(x, 2), rtol=0, atol=1e-6)
        torch.testing.assert_close(call.encode(x), reference.encode(x), rtol=0, atol=1e-6)
        model.reshard()  # type: ignore[operator]
        found, expected = call(x), reference(batch[0])
        found.backward()
        expected.backward()
        for name, param in reference.named_parameters():
            grad = model.get_parameter(name).grad
            assert grad is not None
            assert param.grad is not None
            torch.testing.assert_close(whole(grad), param.grad, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        with torch.no_grad():
            for param in (*model.parameters(), *reference.parameters()):
                param -= 0.1 * param.grad
        model.zero_grad()
        reference.zero_grad()


@pytest.mark.parametrize("way", WAYS)
def test_encode_and_generate_compute_what_the_unsharded_model_does(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:called_between_steps", way=way)
