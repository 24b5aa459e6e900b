"""Batch streams of a run: one for training, and one per validation set.

corpus = open_corpus(config.data, config.model.vocab_size)
stream = training_stream(config, corpus)
sets = validation_streams(config, corpus)        # {"": ...}, or by the names of `data.validation`; {} without any
"""

from __future__ import annotations

from trainer.config.config import Config
from trainer.config.load import ConfigError
from trainer.data.batches import BatchStream
from trainer.data.corpus import open_validation
from trainer.data.mixture import Mixture, TokenSource

__all__ = ["training_stream", "validation_streams"]


def training_stream(config: Config, corpus: TokenSource | Mixture) -> BatchStream:
    """Batches of the training part of `corpus`. Raises ConfigError if it is shorter than a sequence."""
    return _stream(config, corpus, "train", 0.0 if config.data.validation else config.data.validation_ratio)


def validation_streams(config: Config, corpus: TokenSource | Mixture) -> dict[str, BatchStream]:
    """Validation sets by name: The validation data: `data.validation`. Without this setting, the ends of the training
    corpora.

    Raises ConfigError for an unusable set, or if there is none although the run evaluates.
    """
    ratio = config.data.validation_ratio
    if config.data.validation:
        sets = open_validation(config.data, config.model.vocab_size)
        ratio = 1.0
    elif not ratio:
        if config.train.eval_interval:
            raise ConfigError(
                f"train.eval_interval = {config.train.eval_interval}: there is nothing to evaluate on; "
                "data.validation_ratio must be above 0, or data.validation name a folder"
            )
        return {}
    else:
        sets = dict(corpus.parts) if isinstance(corpus, Mixture) else {"": corpus}
    return {name: _stream(config, source, "validation", ratio) for name, source in sets.items()}


def _stream(config: Config, corpus: TokenSource | Mixture, split: str, validation_ratio: float) -> BatchStream:
    return BatchStream(
        corpus,
        seq_len=config.data.seq_len,
        global_batch_size=config.train.global_batch_size,
        seed=config.run.seed,
        validation_ratio=validation_ratio,
        split=split,
    )
