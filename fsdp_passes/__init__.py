"""Fully sharded data parallelism as `torch.compile` graph passes."""

from fsdp_passes.backend import overlap_fsdp as overlap_fsdp
from fsdp_passes.forward_methods import register_fsdp_forward_method as register_fsdp_forward_method
from fsdp_passes.fsdp_module import FsdpModule as FsdpModule
from fsdp_passes.inspect.explain import Explanation as Explanation
from fsdp_passes.inspect.explain import explain as explain
from fsdp_passes.options import OverlapOptions as OverlapOptions
from fsdp_passes.sharding import fully_shard as fully_shard
from fsdp_passes.warmup import warmup as warmup

__version__ = "0.1.0"
