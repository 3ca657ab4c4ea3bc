"""Work of ranks that compute on a GPU: kernels on streams."""

from __future__ import annotations

from fsdp_passes.inspect.trace_contexts import NOTHING, Contexts
from fsdp_passes.inspect.trace_events import TraceEvents
from fsdp_passes.inspect.trace_names import COMMUNICATION, collective_kind, is_collective_kernel
from fsdp_passes.inspect.trace_work import Collective, Work, new_collective

# What the copy engines move between devices hides nothing; NCCL moves some collectives so.
DEVICE_COPIES = ("Memcpy HtoD", "Memcpy DtoH", "Memcpy PtoP")


def understand_gpu_work(events: TraceEvents, contexts: Contexts) -> tuple[Work, Work, list[Collective]]:
    """Sort a GPU's work into compute, copies and collectives.

    A kernel belongs to what its launch was inside of; where the launch is not in the trace (a CUDA graph's kernels), to
    the annotation that the GPU's own row shows around it.
    """
    gpu_contexts = Contexts(events.gpu_annotations, events.names)
    compute, copies = Work(), Work()
    collectives = []
    for index in events.gpu.in_order():
        begin, end = events.gpu.begins[index], events.gpu.ends[index]
        name_index, lane = events.gpu.names[index], events.gpu.lanes[index]
        name = events.names.all[name_index]
        launch = events.launches.find(events.correlations[index])
        meaning = contexts.at(*launch) if launch is not None else NOTHING
        if meaning == NOTHING:
            meaning = gpu_contexts.at(lane, begin)
        if is_collective_kernel(name):
            kind = collective_kind(name)
            if kind == "other":  # RCCL's kernels have one name for all kinds
                kind = collective_kind(events.collective_names[index])
            num_bytes = events.message_bytes[index]
            collectives.append(new_collective(begin, end, kind, name, lane, meaning, num_bytes, launch))
        elif meaning.role == COMMUNICATION or name.startswith(DEVICE_COPIES):
            copies.append(begin, end, (meaning.unit, meaning.phase), name_index)
        else:
            compute.append(begin, end, (meaning.unit, meaning.phase), name_index)
    return compute, copies, collectives
