"""`torch.utils.checkpoint` with `use_reentrant=True`: a forward and a backward of a unit inside of a backward."""

from __future__ import annotations

import pytest

from fsdp_passes import fully_shard, overlap_fsdp
from fsdp_passes.unit import unit_of
from tests.models import Checkpointed, token_batches
from tests.ranks import RankPool
from tests.training import assert_same, build, my_share, recorded_all_gathers, train

HERE = "tests.distributed.test_reentrant_checkpoint"


class Reentrant(Checkpointed):
    use_reentrant = True


# ---- on the ranks ----------------------------------------------------------------------------------------------------


def trains(way: str, accumulates: bool) -> int:
    """Losses, gradients and parameters equal those of the unsharded model with the same checkpoints; returns the
    number of the layers' all-gathers in one step."""
    model, reference = build(lambda: Reentrant(hidden=125))
    fully_shard(model, units=["layers.*"])
    if way != "fallback":
        for layer in model.layers:
            layer.compile(backend=overlap_fsdp, options={"inner": way})
    batches = token_batches(3, 4, 16)
    if accumulates:
        with model.no_sync():
            model(*my_share(batches[0])).backward()
        reference(*batches[0]).backward()
    found = train(model, batches, sharded=True)
    assert_same(found, train(reference, batches, sharded=False))
    model(*my_share(batches[0])).backward()
    with recorded_all_gathers("layers") as gathers:
        model(*my_share(batches[0])).backward()
    unit = unit_of(model)
    assert unit is not None
    whole = [p for other in unit.context.units for p in other.params if p.placeholder.untyped_storage().size()]
    assert whole == []
    assert not unit.context.phases
    return len(gathers)


# ---- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("way", ["fallback", "aot_eager"])
def test_layers_under_reentrant_checkpoints_train_as_unsharded(
    two_ranks: RankPool, way: str, accumulates: bool
) -> None:
    # The backward of the fallback gathers a layer once, to compute it again; compiled, each graph gathers for itself.
    num_gathers = {"fallback": 2 * 3, "aot_eager": 3 * 3}[way]
    assert two_ranks.run(f"{HERE}:trains", way=way, accumulates=accumulates) == [num_gathers] * 2
