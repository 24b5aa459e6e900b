"""Callbacks and trackers for training frameworks; each module imports its framework.

from rankscope.frameworks.huggingface import RankscopeCallback      # transformers.Trainer
from rankscope.frameworks.lightning import RankscopeCallback        # lightning.Trainer
from rankscope.frameworks.accelerate import RankscopeTracker        # accelerate.Accelerator

All attach like `rankscope run` (`probes.attach.auto_attach`): the process groups before the framework wraps the model,
the model at its first call, the optimizer at its first step. Each adds values that only its framework has, such as the
evaluation loss.
"""
