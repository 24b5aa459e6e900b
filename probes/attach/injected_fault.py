"""The fault that a drill injects into a rank, as the launcher hands it over in an environment variable. No torch.

fault = InjectedFault(name="kill", step=40, rank=1)
os.environ[VARIABLE] = fault.text
InjectedFault.parse(os.environ[VARIABLE])
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["VARIABLE", "InjectedFault"]

VARIABLE = "RANKSCOPE_DRILL"


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    """A fault with its step, rank and size. `lasts`: from its step on; else it strikes once."""

    name: str
    step: int
    rank: int
    seconds: float = 0.02
    lasts: bool = False

    @property
    def text(self) -> str:
        """The value of the environment variable."""
        return f"{self.name}@step={self.step},rank={self.rank},seconds={self.seconds:.4f},lasts={int(self.lasts)}"

    @classmethod
    def parse(cls, text: str) -> InjectedFault:
        """Read `text`. Raises ValueError."""
        name, _, rest = text.partition("@")
        values = dict(part.split("=", 1) for part in rest.split(",") if "=" in part)
        try:
            return cls(
                name=name, step=int(values["step"]), rank=int(values["rank"]),
                seconds=float(values.get("seconds", 0.02)), lasts=values.get("lasts", "0") == "1",
            )  # fmt: skip
        except KeyError as error:
            raise ValueError(f"{text}: {error} is missing") from None
