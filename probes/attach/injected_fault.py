"""A drill's fault, passed from the launcher to a rank in an environment variable. Needs no torch.

fault = InjectedFault(name="kill", step=40, rank=1)
os.environ[VARIABLE] = fault.text
InjectedFault.parse(os.environ[VARIABLE])
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["VARIABLE", "InjectedFault"]

VARIABLE = "RANKSCOPE_DRILL"
_FOREVER = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    """A fault with its step, rank and size. If `lasts`, it acts from its step to step `until`; otherwise once."""

    name: str
    step: int
    rank: int
    seconds: float = 0.02
    lasts: bool = False
    until: int = _FOREVER

    @property
    def text(self) -> str:
        """The value of the environment variable."""
        lasts = f"lasts={int(self.lasts)},until={self.until}"
        return f"{self.name}@step={self.step},rank={self.rank},seconds={self.seconds:.4f},{lasts}"

    @classmethod
    def parse(cls, text: str) -> InjectedFault:
        """Read `text`. Raises ValueError."""
        name, _, rest = text.partition("@")
        values = dict(part.split("=", 1) for part in rest.split(",") if "=" in part)
        try:
            return cls(
                name=name, step=int(values["step"]), rank=int(values["rank"]),
                seconds=float(values.get("seconds", 0.02)), lasts=values.get("lasts", "0") == "1",
                until=int(values.get("until", _FOREVER)),
            )  # fmt: skip
        except KeyError as error:
            raise ValueError(f"{text}: {error} is missing") from None
