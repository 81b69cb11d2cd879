from collections.abc import Callable

__version__: str

class PlanError(ValueError): ...
class DoesNotFit(PlanError): ...

class Planned:
    def to_json(self) -> str: ...
    def table(self, detail: str) -> str: ...
    def report(self) -> str: ...
    def shardings(self) -> str: ...
    def collectives(self) -> str: ...
    def xla_memory(self, donated: list[int]) -> int: ...
    def layouts(self) -> str: ...
    def to_sdy(self) -> str: ...

def plan(
    model: str,
    *,
    text: str | None,
    machine: str,
    memory: str | None,
    solver: str,
    batch: int | None,
    optimizer: str,
    costs: str | None,
    untied: bool,
    fix: list[str],
    roles: list[str],
    opaque: list[str],
    dims: list[str],
    loss: str,
    inference: bool,
    time: float,
    threads: int,
    seed: int,
    tell: Callable[[float, float | None, float], None] | None,
) -> Planned: ...
def devices(machine: str) -> int: ...
