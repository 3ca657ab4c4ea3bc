"""The cost of a whole step in closed form: evaluated, printed, and solved for where its communication is hidden."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import sympy

from fsdp_passes.cost import collectives
from fsdp_passes.cost.hardware import Cluster
from fsdp_passes.cost.symbolic import BANDWIDTH, LATENCY_US, WORLD_SIZE, Exposure, GraphCost, input_symbol
from fsdp_passes.errors import CostValueError

LARGEST = 2**40  # a size beyond which nobody looks for hidden communication


@dataclasses.dataclass(frozen=True)
class CostValues:
    """A cost at given sizes; bytes of one rank, times in microseconds."""

    communication_bytes: int
    flops: int
    compute_us: float
    exposed_us: float
    step_us: float
    peak_unsharded_bytes: int


@dataclasses.dataclass(frozen=True)
class ModelCost:
    """Closed forms of a step's graphs, and the sizes at which they were traced.

    Sizes are given by name: those of the inputs ("batch", "length"), "world_size", "bandwidth" (bytes per second that a
    rank receives) and "latency_us" (of one collective). What is not given is as traced; bandwidth and latency follow
    from the cluster and the number of ranks.
    """

    graphs: tuple[GraphCost, ...]
    defaults: Mapping[str, int]
    cluster: Cluster

    @property
    def step_us(self) -> sympy.Expr:
        """All graphs, one behind the other."""
        return sympy.Add(*[graph.step_us for graph in self.graphs])

    @property
    def communication_bytes(self) -> sympy.Expr:
        """Bytes that a rank receives in a step."""
        return sympy.Add(*[graph.communication_bytes for graph in self.graphs])

    @property
    def flops(self) -> sympy.Expr:
        """Floating-point operations of a step on one rank."""
        return sympy.Add(*[graph.flops for graph in self.graphs])

    @property
    def peak_unsharded_bytes(self) -> sympy.Expr:
        """Most bytes of gathered parameters alive at once."""
        return sympy.Max(*[graph.peak_unsharded_bytes for graph in self.graphs], evaluate=False)

    def values(self, **sizes: float) -> dict[sympy.Symbol, float]:
        """Every symbol's value. Raises `CostValueError` for an unknown name or a value below its range."""
        known = {**self.defaults, "bandwidth": None, "latency_us": None}
        for name, value in sizes.items():
            if name not in known:
                raise CostValueError(name, "no such size", f"one of {', '.join(known)}")
            if not value >= (0 if name == "latency_us" else 1):
                raise CostValueError(name, value, "a number of at least 1")
        given = {**self.defaults, **sizes}
        world_size = int(given["world_size"])
        given.setdefault("bandwidth", collectives.bandwidth(world_size, self.cluster))
        given.setdefault("latency_us", collectives.latency_us(world_size, self.cluster))
        named = {"world_size": WORLD_SIZE, "bandwidth": BANDWIDTH, "latency_us": LATENCY_US}
        return {named.get(name) or input_symbol(name): value for name, value in given.items()}

    def evaluate(self, **sizes: float) -> CostValues:
        """The cost at these sizes."""
        values = self.values(**sizes)
        compute = sum(_number(graph.compute_us, values) for graph in self.graphs)
        exposed = sum(_number(graph.exposed_us, values) for graph in self.graphs)
        return CostValues(
            round(_number(self.communication_bytes, values)),
            round(_number(self.flops, values)),
            compute,
            exposed,
            compute + exposed,
            round(max(_number(graph.peak_unsharded_bytes, values) for graph in self.graphs)),
        )

    # ---- from where on the communication is hidden -------------------------------------------------------------------

    def _avoidable(self) -> list[Exposure]:
        return [exposure for graph in self.graphs for exposure in graph.exposures if exposure.is_avoidable]

    def still_exposed(self, **sizes: float) -> list[str]:
        """Waits that these sizes leave exposed although compute could hide them."""
        values = self.values(**sizes)
        return [exposure.label for exposure in self._avoidable() if _shortfall_us(exposure, values) > 0]

    def hidden_from(self, name: str = "length", **sizes: float) -> int | None:
        """The smallest value of "length", "batch" or "bandwidth" (bytes per second, in steps of 1) from which compute
        hides all communication but the first gather and the last reductions; None when no value up to 2**40 does.

        Exact for the closed forms, which more of any of these can only help.
        """
        if name in ("world_size", "latency_us"):
            raise CostValueError(name, "asked for", "a size of the inputs or the bandwidth, which more of can hide")

        def is_hidden(value: int) -> bool:
            return not self.still_exposed(**{**sizes, name: value})

        if not is_hidden(LARGEST):
            return None
        low, high = 0, 1
        while not is_hidden(high):
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if is_hidden(middle) else (middle, high)
        return high

    def binding(self, name: str = "length", **sizes: float) -> Exposure | None:
        """The wait that decides `hidden_from`; None when none is exposed at size 1."""
        bound = self.hidden_from(name, **sizes)
        values = self.values(**{**sizes, name: max(1, (bound or LARGEST) - 1)})
        exposed = [exposure for exposure in self._avoidable() if _shortfall_us(exposure, values) > 0]
        return max(exposed, key=lambda exposure: _shortfall_us(exposure, values), default=None)

    def solve(self, name: str = "length") -> sympy.Expr | None:
        """The closed form behind `hidden_from`: the value of `name` at which the binding wait's communication takes as
        long as its compute, in the other symbols. Products are taken as bound by arithmetic, and rows as unpadded.

        None when nothing binds, or when more of `name` does not hide it.
        """
        exposure = self.binding(name)
        if exposure is None:
            return None
        symbol = self._symbol(name)
        # ceiling(rows / world_size) * world_size is `rows` where nothing is padded.
        races = [exposure.own, *([exposure.queued] if exposure.queued is not None else [])]
        values = self.values()
        race = max(races, key=lambda race: _number(race.shortfall_us, values))
        equation = sympy.expand(_unpadded(race.communication_us) - race.arithmetic_us)
        equation = sympy.nsimplify(equation, rational=True)
        solutions = [solution for solution in sympy.solve(equation, symbol) if solution != 0]
        values.pop(symbol, None)
        positive = [solution for solution in solutions if _is_positive(solution, values)]
        return sympy.simplify(positive[0]) if positive else None

    def _symbol(self, name: str) -> sympy.Symbol:
        return BANDWIDTH if name == "bandwidth" else input_symbol(name)

    # ---- text --------------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        values = self.evaluate()
        sizes = ", ".join(f"{name} {value}" for name, value in self.defaults.items())
        lines = [
            f"cost of one step on {self.cluster.name}, at {sizes}:",
            f"  communication  {values.communication_bytes / 2**30:.3f} GiB received by each rank",
            f"  compute        {values.flops / 1e12:.3f} TFLOP, {values.compute_us / 1e3:.3f} ms",
            f"  exposed        {values.exposed_us / 1e3:.3f} ms",
            f"  step           {values.step_us / 1e3:.3f} ms",
            f"  peak unsharded {values.peak_unsharded_bytes / 2**30:.3f} GiB",
        ]
        for graph in self.graphs:
            peak = graph.peak_unsharded_bytes.replace(sympy.ceiling, lambda argument: argument)
            lines += [
                f"{graph.phase}:",
                f"  communication bytes = {_text(_unpadded(graph.communication_bytes))}",
                f"  FLOPs = {_text(graph.flops)}",
                f"  peak unsharded bytes = {_text(peak)}",
                f"  compute us = {_text(graph.compute_us)}",
                "  step us = compute us + the exposed time of its waits (each where products are bound by arithmetic "
                "and nothing queues):",
                *_exposure_lines(graph),
            ]
        for name in self.defaults:
            if name != "world_size":
                lines.append(self._hidden_text(name))
        return "\n".join(lines)

    def _hidden_text(self, name: str) -> str:
        bound = self.hidden_from(name)
        if bound is None:
            exposure = self.binding(name)
            assert exposure is not None
            return f"no {name} hides the communication: {exposure.label} takes too long"
        text = f"communication is hidden from {name} {bound} on"
        solution = self.solve(name)
        return text if solution is None else f"{text}; {name} = {_text(solution)}"


def _number(expression: sympy.Expr, values: Mapping[sympy.Symbol, float]) -> float:
    symbols = tuple(values)
    return float(_compiled(expression, symbols)(*values.values()))


@functools.lru_cache(maxsize=4096)
def _compiled(expression: sympy.Expr, symbols: tuple[sympy.Symbol, ...]) -> Any:
    return sympy.lambdify(symbols, expression, modules="math", cse=True)


def _shortfall_us(exposure: Exposure, values: Mapping[sympy.Symbol, float]) -> float:
    return _number(exposure.each_us, values)


def _is_positive(solution: sympy.Expr, values: Mapping[sympy.Symbol, float]) -> bool:
    number = complex(solution.subs(values))
    return abs(number.imag) < 1e-9 and number.real > 0


def _unpadded(expression: sympy.Expr) -> sympy.Expr:
    """As if the ranks divided all rows; what padding adds is small, and its formula long."""
    return sympy.expand(expression.replace(sympy.ceiling, lambda argument: argument))


def _text(expression: sympy.Expr) -> str:
    """With four digits; integers are factored instead."""
    if isinstance(expression, sympy.Max):
        inner = list(dict.fromkeys(_text(argument) for argument in expression.args))
        return inner[0] if len(inner) == 1 else f"max({', '.join(inner)})"
    if expression.has(sympy.Float) or expression.has(BANDWIDTH):
        return str(sympy.N(expression, 4))
    return str(sympy.factor(expression))


def _exposure_lines(graph: GraphCost) -> list[str]:
    lines = []
    for exposure in graph.exposures:
        times = f"{exposure.count} x " if exposure.count > 1 else ""
        race = exposure.own
        lines.append(
            f"    {times}{exposure.label}: max(0, {_text(_unpadded(race.communication_us))} "
            f"- ({_text(race.arithmetic_us)}))"
        )
    return lines
