"""Checks of a run that need its store: they belong to neither the settings alone nor the data alone."""

from longctx.config import Config, ConfigError, Problem
from longctx.data.store import Store
from longctx.data.tokenizer import Tokenizer


def check_store(config: Config, store: Store) -> None:
    """Raises ConfigError if the store has another tokenizer than `data.tokenizer`, or the model is too small for it."""
    config.model.shape(store.tokenizer.vocab_size)
    wanted = config.data.tokenizer
    if wanted is not None and Tokenizer.load(wanted).fingerprint != store.tokenizer.fingerprint:
        rule = f"store {config.data.store} was made with another tokenizer (fingerprint {store.tokenizer.fingerprint[:12]})"
        fix = f"make the store again with `longctx prepare --tokenizer {wanted} --out OTHER`, or leave data.tokenizer out"
        raise ConfigError.of([Problem("data.tokenizer", str(wanted), rule, fix)], "the configuration")
