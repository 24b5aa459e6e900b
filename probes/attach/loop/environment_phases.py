"""Record interaction with reinforcement-learning environments as phase `environment`.

    environments = EnvironmentPhases(phases)
    environments.patch(imports)

The phase is one span from the first action after an update to the start of training: an action may take only
microseconds, too short for a span each. It includes the policy that chooses the actions. Environments are recognised by
their libraries' base classes and wrappers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, Protocol

from ...fail_open import failing_open
from ..patching.on_import import OnImport

__all__ = ["ENVIRONMENT", "EnvironmentPhases"]

ENVIRONMENT = "environment"
_PLACES = (
    ("gymnasium.core", "Env", "reset"),  # every environment's `reset` calls it first
    ("gymnasium.wrappers.common", "OrderEnforcing", "step"),  # wraps everything that `gymnasium.make` returns
    ("gymnasium.vector.vector_env", "VectorEnv", "reset"),
    ("gymnasium.vector.sync_vector_env", "SyncVectorEnv", "step"),
    ("gymnasium.vector.async_vector_env", "AsyncVectorEnv", "step_wait"),
    ("gym.core", "Env", "reset"),
    ("gym.wrappers.order_enforcing", "OrderEnforcing", "step"),
    ("gym.vector.vector_env", "VectorEnv", "step"),
    ("stable_baselines3.common.vec_env.base_vec_env", "VecEnv", "step"),
    ("pettingzoo.utils.wrappers.order_enforcing", "OrderEnforcingWrapper", "step"),
    ("torchrl.envs.common", "EnvBase", "step"),
)


class _Phases(Protocol):
    """Phases of a loop, as `loop_hooks.LoopPhases` records them."""

    def replace(self, place: Any, name: str, wrapper: Callable[..., Any]) -> None: ...

    def enter(self, kind: str) -> None: ...

    def begin(self) -> None: ...

    def is_in(self, kind: str) -> bool: ...


class EnvironmentPhases:
    """Starts the phase when the loop acts in an environment; the next training phase ends it."""

    def __init__(self, phases: _Phases) -> None:
        self._phases = phases

    def patch(self, imports: OnImport) -> None:
        """Wrap the classes of imported libraries now, and those of others when they are imported."""
        for module, owner, method in _PLACES:
            imports.when(module, partial(self._patch, owner, method))

    def _patch(self, owner: str, method: str, module: ModuleType) -> None:
        environment_class = getattr(module, owner, None)
        if hasattr(environment_class, method):
            self._phases.replace(environment_class, method, self._act)

    def _act(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._phases.is_in(ENVIRONMENT):
            with failing_open("attach.environment"):
                self._phases.begin()
                self._phases.enter(ENVIRONMENT)
        return real(*args, **kwargs)
