"""GPUs and machines by name: memory as the driver reports it, peaks, links, prices with their date."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from polyturn.config.yaml_lines import dotted, parse_yaml
from polyturn.errors import ConfigError, nearest

_KNOWN = Path(__file__).with_name("hardware.yaml")
_SAGEMAKER = "ml."
_SHOWN = 60
MOST_NODES = 1024
MOST_GPUS = 1024
"""Of a machine."""

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Name = Annotated[str, Field(min_length=1)]
_Entry = TypeVar("_Entry")


class _Facts(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Gpu(_Facts):
    """Facts of one kind of GPU."""

    label_gib: _Positive
    """Memory as its name says."""
    usable_mib: _Positive
    """Memory as the driver reports it to a process."""
    usable_from: Literal["measured", "estimate"] = "measured"
    bf16_tflops: _Positive
    """Dense peak."""
    bandwidth_gb_s: _Positive
    """Of its memory."""

    @property
    def usable_bytes(self) -> int:
        """What a process can have."""
        return round(self.usable_mib * (1 << 20))


class Instance(_Facts):
    """Facts of one type of machine."""

    gpu: str
    """Name of its GPUs."""
    count: Annotated[int, Field(gt=0)]
    ram_gib: _Positive | None = None
    """Memory of the machine itself; None where nobody said."""
    nvlink: bool = False
    """Between its GPUs."""
    efa_gbit_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0
    """Between machines; 0 without EFA."""
    price: _Positive | None = None
    """Dollars an hour; None where there is no list price."""
    sagemaker_price: _Positive | None = None
    """The same as a SageMaker job (`ml.` before the name)."""


class _File(_Facts):
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    gpus: dict[_Name, Gpu] = Field(default_factory=dict)
    instances: dict[_Name, Instance] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """GPUs of one kind, as an instance has them or as a user counts them."""

    name: str
    gpu_name: str
    gpu: Gpu
    count: int
    ram_bytes: float | None = None
    """Memory of each node itself; None where nobody said."""
    nvlink: bool | None = None
    """None where nobody said."""
    efa_gbit_s: float = 0
    """Between nodes; 0 without EFA, or where nobody said."""
    nodes: int = 1
    """Such machines."""
    price: float | None = None
    """Dollars an hour, of one node."""
    price_date: str | None = None

    @property
    def total(self) -> int:
        """GPUs of all nodes."""
        return self.count * self.nodes

    @property
    def total_price(self) -> float | None:
        """Dollars an hour, of all nodes."""
        return None if self.price is None else self.price * self.nodes

    def times(self, nodes: int) -> Machine:
        """`nodes` machines of this type. Raises ConfigError."""
        if not 1 <= nodes <= MOST_NODES:
            raise ConfigError(f"--nodes={nodes}: give how many machines there are, from 1 to {MOST_NODES:,}")
        return replace(self, nodes=nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Everything that is known by name."""

    gpus: Mapping[str, Gpu]
    instances: Mapping[str, Instance]
    dates: Mapping[str, str]
    """By instance: the day of its price."""

    def gpu(self, name: str) -> Gpu:
        """The GPU of that name. Raises ConfigError with the nearest one."""
        return _found(self.gpus, name, "--gpu")

    def machine(self, name: str) -> Machine:
        """The instance of that name, `ml.` before it or not. Raises ConfigError with the nearest one."""
        on_sagemaker = name.startswith(_SAGEMAKER) and name not in self.instances
        key = name.removeprefix(_SAGEMAKER) if on_sagemaker else name
        prefix = _SAGEMAKER if on_sagemaker else ""
        instance = _found({prefix + known: one for known, one in self.instances.items()}, name, "--instance")
        price = instance.sagemaker_price if on_sagemaker else instance.price
        return Machine(
            name=name,
            gpu_name=instance.gpu,
            gpu=self.gpus[instance.gpu],
            count=instance.count,
            ram_bytes=None if instance.ram_gib is None else instance.ram_gib * (1 << 30),
            nvlink=instance.nvlink,
            efa_gbit_s=instance.efa_gbit_s,
            price=price,
            price_date=None if price is None else self.dates[key],
        )

    def gpus_alone(self, name: str, count: int) -> Machine:
        """`count` GPUs of that name, without a price. Raises ConfigError."""
        if not 1 <= count <= MOST_GPUS:
            raise ConfigError(f"--gpus={count}: a machine has from 1 to {MOST_GPUS:,} GPUs; give how many there are")
        return Machine(name=f"{count} x {name}", gpu_name=name, gpu=self.gpu(name), count=count)


def load_hardware(*added: str | Path) -> Hardware:
    """What comes with Polyturn, and then each file in `added`, whose names replace older ones. Raises ConfigError."""
    gpus: dict[str, Gpu] = {}
    instances: dict[str, Instance] = {}
    dates: dict[str, str] = {}
    files = [(_KNOWN, _known()), *((path, _read(path)) for path in map(Path, added))]
    for path, file in files:
        gpus.update(file.gpus)
        instances.update(file.instances)
        dates.update(dict.fromkeys(file.instances, file.date))
        for name, instance in file.instances.items():
            if instance.gpu not in gpus:
                raise ConfigError(f"{path}: instances.{name}.gpu={instance.gpu} is no known GPU; {nearest(instance.gpu, gpus)}")
    return Hardware(gpus=gpus, instances=instances, dates=dates)


@cache
def _known() -> _File:
    """What comes with Polyturn, which doesn't change while a process lives."""
    return _read(_KNOWN)


def _read(path: Path) -> _File:
    try:
        document = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read ({error}); name a YAML file of GPUs and instances") from error
    for problem in document.problems:
        raise ConfigError(f"{path}:{problem.line}: {problem.sentence}")
    try:
        return _File.model_validate(document.data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = dotted(first["loc"]) if first["loc"] else "the file"
        shown = repr(first["input"])[:_SHOWN]
        raise ConfigError(
            f"{path}: {where}: {first['msg'][0].lower()}{first['msg'][1:]} (found {shown}); docs/planner.md shows the form"
        ) from error


def _found(known: Mapping[str, _Entry], name: str, option: str) -> _Entry:
    if name in known:
        return known[name]
    raise ConfigError(f"{option}={name} is not known; {nearest(name, known)}")
