"""Generated code with collectives in place, as Inductor writes the replicas' all-reduces."""

from __future__ import annotations

import pytest

from fsdp_passes.errors import ScheduleError
from fsdp_passes.generated_code import check_generated_code, read_generated_code

IN_PLACE = """\
def call(args):
    torch.ops._c10d_functional.all_reduce_coalesced_.default([buf1, buf2], 'sum', '5')
    buf3 = torch.ops._c10d_functional.wait_tensor.default(buf1)
    {between}
    buf4 = torch.ops._c10d_functional.wait_tensor.default(buf2)
    cpp_fused_mul_0(buf2, buf5)
    return (buf5, )
"""


REUSED = """\
def call(args):
    buf9 = torch.ops._c10d_functional.reduce_scatter_tensor_coalesced.default([buf1, reinterpret_tensor(buf2, (4, ), (1, ), 0)], 'sum', 2, '0')
    buf10 = buf9[0]
    {in_flight}
    torch.ops._c10d_functional.wait_tensor.default(buf10)
    {behind}
    cpp_fused_mul_0(buf10, buf11)
"""  # noqa: E501


@pytest.mark.parametrize("sent", ["buf1", "buf2"])
def test_what_a_collective_sends_is_not_used_again_before_its_wait(sent: str) -> None:
    reuse = f"buf11 = reinterpret_tensor({sent}, (2, 2), (2, 1), 0); del {sent}  # reuse"
    check_generated_code(REUSED.format(in_flight="", behind=reuse), scheduled=None, where="here")
    with pytest.raises(ScheduleError, match=f"the memory of {sent}, which it sends, is used again before its wait"):
        check_generated_code(REUSED.format(in_flight=reuse, behind=""), scheduled=None, where="here")


def test_every_tensor_of_an_all_reduce_in_place_is_its_result() -> None:
    steps = read_generated_code(IN_PLACE.format(between=""))
    assert [(step.kind, step.name, step.start) for step in steps] == [
        ("start", "all_reduce_coalesced_", ("buf1",)),
        ("wait", "wait_tensor", ("buf1",)),
        ("wait", "wait_tensor", ("buf1",)),
        ("kernel", "cpp_fused_mul_0", ("buf1",)),
    ]
    scheduled = ["start all_reduce_coalesced_", "wait", "wait"]
    check_generated_code(IN_PLACE.format(between=""), scheduled=scheduled, where="here")
    with pytest.raises(ScheduleError, match="reads a result before its wait"):
        check_generated_code(IN_PLACE.format(between="cpp_fused_mul_1(buf2, buf6)"), scheduled=None, where="here")
