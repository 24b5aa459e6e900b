"""Record interaction with reinforcement-learning environments as phase `environment`.

    environments = EnvironmentPhases(phases)
    undo = environments.patch(imports)

The phase is one span from the first action after an update to the start of training: an action may take only
microseconds, too short for a separate span. It includes the policy that chooses the actions.

Environments of known libraries are recognised by base classes and wrappers. Other environments are recognised by the
policy, a torch distribution: the loop calls its `sample`, and later its `log_prob` with values that need no gradient.
PPO does this for each action, and REINFORCE to compute its loss. Variational models call `rsample` and do not match.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import distributions

from ...fail_open import failing_open
from ..patching.on_import import OnImport
from ..patching.replaced import replaced

__all__ = ["ENVIRONMENT", "EnvironmentPhases"]

ENVIRONMENT = "environment"
_PLACES = (
    ("gymnasium.core", "Env", "reset"),  # the `reset` of every environment calls this function first
    ("gymnasium.wrappers.common", "OrderEnforcing", "step"),  # `gymnasium.make` wraps each environment in this class
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
_POLICIES = (distributions.Categorical, distributions.Bernoulli, distributions.Normal, distributions.MultivariateNormal)
"""Base distributions, of which others (`Independent`, one-hot, subclasses of RL libraries) are composed."""


class _Phases(Protocol):
    """Phases of a loop, as `loop_hooks.LoopPhases` records them."""

    def replace(self, place: Any, name: str, wrapper: Callable[..., Any]) -> None: ...

    def enter(self, kind: str) -> None: ...

    def begin(self) -> None: ...

    def leave(self, kind: str) -> None: ...

    def is_in(self, kind: str) -> bool: ...

    def is_here(self, *, trains: bool) -> bool: ...


class EnvironmentPhases:
    """Starts the phase when the loop acts in an environment; the next training phase ends it."""

    def __init__(self, phases: _Phases) -> None:
        self._phases = phases
        self._sampled: WeakSet[distributions.Distribution] = WeakSet()

    def patch(self, imports: OnImport) -> list[Callable[[], None]]:
        """Wrap the libraries' classes, now or once they are imported, and torch's distributions. Returns functions that
        restore the distributions.
        """
        for module, owner, method in _PLACES:
            imports.when(module, partial(self._patch, owner, method))

        # These wrappers are functions and not bound methods, because torch.compile traces through them.
        def is_here() -> bool:
            return self._phases.is_here(trains=False)

        def applies() -> bool:
            return not torch.compiler.is_compiling() and is_here()

        def sample(*args: Any, **kwargs: Any) -> Any:
            return self._sample(*args, **kwargs)

        def score(*args: Any, **kwargs: Any) -> Any:
            return self._score(*args, **kwargs)

        wrapped = (("sample", sample), ("log_prob", score))
        return [replaced(one, name, by, applies=applies) for one in _POLICIES for name, by in wrapped]

    def _patch(self, owner: str, method: str, module: ModuleType) -> None:
        environment_class = getattr(module, owner, None)
        if hasattr(environment_class, method):
            self._phases.replace(environment_class, method, self._act)

    def _act(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with failing_open("attach.environment"):
            self._enter_phase()
        return real(*args, **kwargs)

    def _enter_phase(self) -> None:
        if not self._phases.is_in(ENVIRONMENT):
            self._phases.begin()
            self._phases.enter(ENVIRONMENT)

    def _sample(self, real: Callable[..., Any], policy: distributions.Distribution, *args: Any, **kwargs: Any) -> Any:
        with failing_open("attach.environment"):
            self._sampled.add(policy)
        return real(policy, *args, **kwargs)

    def _score(self, real: Callable[..., Any], policy: distributions.Distribution, *args: Any, **kwargs: Any) -> Any:
        with failing_open("attach.environment"):
            has_gradient = any(getattr(value, "requires_grad", False) for value in (*args, *kwargs.values()))
            # If a model samples within its training pass, the time belongs to the pass and not to a rollout.
            if policy in self._sampled and not has_gradient and not self._phases.is_in("forward"):
                self._phases.leave("evaluate")
                self._enter_phase()
        return real(policy, *args, **kwargs)
