"""Target of an evaluation: the newest checkpoint of a run, or a checkpoint of transformers; opened
once on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from longctx.config import Config, load
from longctx.data.records.tokenizer import Tokenizer
from longctx.data.store.manifest import is_store
from longctx.data.store.store import Store
from longctx.errors import UserError
from longctx.hf.source import ModelSource
from longctx.model.checkpoint_files import check_name
from longctx.model.protocol import differences_but_rope
from longctx.parallel.mesh import Mesh
from longctx.training.data import choose_max_length
from longctx.training.runner import ModelRunner
from longctx.training.saved.checkpoint import Checkpoint, because, load_weights, newest


@dataclass(frozen=True)
class Target:
    """A run or a checkpoint to evaluate.

    Attributes:
        name: run folder, or folder or hub name of a checkpoint, as given.
        config: settings of the run, or defaults, with overrides.
        checkpoint: of the run; None for a checkpoint of transformers.
    """

    name: str
    config: Config
    checkpoint: Checkpoint | None
    notes: tuple[str, ...] = ()

    @classmethod
    def open(cls, name: str, overrides: Sequence[str], world_size: int) -> "Target":
        """Opens a run or a checkpoint. Raises UserError if there is neither of this name, or if
        settings are wrong."""
        folder = Path(name)
        if (folder / "config.yaml").is_file():
            newest_one, damaged = newest(folder)
            if newest_one is None:
                why = because(damaged)
                raise UserError(
                    f"run folder {folder} has no complete checkpoint{why}: there is nothing to "
                    "evaluate"
                )
            config = load(folder / "config.yaml", overrides, world_size=world_size)
            return cls(name, config, newest_one, tuple(damaged))
        if is_store(folder):
            raise UserError(
                f"{folder} is a store of documents: give a run or a checkpoint, and this store as "
                f"--store {folder}"
            )
        if folder.is_dir() and not any(
            (folder / name).is_file() for name in ("config.json", "adapter_config.json")
        ):
            raise UserError(
                f"{folder} has no config.yaml and no config.json: give the folder of a run "
                "(train.run_dir), or of a checkpoint of transformers"
            )
        check_name(name)
        return cls(
            name,
            load(None, [f"model.from_pretrained={name}", *overrides], world_size=world_size),
            None,
        )

    @property
    def folder(self) -> Path | None:
        """Folder of the run; None for a checkpoint of transformers, which is never written to."""
        if self.checkpoint is not None:
            return Path(self.name)
        return None

    @property
    def described(self) -> str:
        """Name of the model, and step of its checkpoint."""
        if self.checkpoint is None:
            return self.name
        return f"{self.name} at step {self.checkpoint.step}"

    @property
    def source(self) -> ModelSource:
        """The model, with the vocabulary size of its training."""
        if self.checkpoint is None:
            vocab_size = None
        else:
            vocab_size = self.checkpoint.state["model"].get("vocab_size")
        if self.config.model.new_tokens is not None:
            vocab_size = self.tokenizer().vocab_size
        return self.config.model_source(vocab_size)

    def tokenizer(self) -> Tokenizer:
        """Returns the tokenizer that the model was trained with. Raises UserError if there is
        none."""
        if self.checkpoint is not None:
            return Store.open(self.config.data.paths[0]).tokenizer
        file = Path(self.name) / "tokenizer.json"
        if not file.is_file():
            raise UserError(
                f"{self.name} has no tokenizer.json: give a store made with its tokenizer as "
                "--store"
            )
        return Tokenizer.load(file)

    def check(self, tokenizer: Tokenizer) -> None:
        """Raises UserError if the model's vocabulary is smaller than that of a store's
        tokenizer."""
        entries = self.source.spec.vocab_size
        if entries is not None and tokenizer.vocab_size > entries:
            raise UserError(
                f"the store's tokenizer has {tokenizer.vocab_size:,} entries, but the model has "
                f"{entries:,}: prepare the store with the model's tokenizer"
            )

    def other_tokenizer(self, tokenizer: Tokenizer) -> str:
        """Returns a warning if a store's tokenizer is not the model's; empty if it is, or if the
        model has none."""
        file = (
            self.config.data.paths[0] if self.checkpoint is not None else Path(self.name)
        ) / "tokenizer.json"
        if (
            not file.is_file()
            or Tokenizer.load(file, tokenizer.end_of_document_token).fingerprint
            == tokenizer.fingerprint
        ):
            return ""
        return (
            f"the store was made with another tokenizer than {file}: losses are meaningless if "
            "token ids differ"
        )

    def max_length(self, world_size: int, longest: int | None = None) -> int:
        """Returns the maximum tokens of a piece of a document, as in training; `longest` is the
        longest document, if known."""
        return choose_max_length(self.config, world_size, self.checkpoint, longest)

    def build(self, mesh: Mesh) -> "tuple[ModelRunner, Target]":
        """Builds the model with its weights on this rank; returns it, and this target with more
        notes. All ranks call it."""
        # Compiling takes longer than a short evaluation: only if the settings demand it.
        runner = ModelRunner(
            self.config.changed({"train.compile": bool(self.config.train.compile)}),
            mesh,
            self.source,
        )
        saved = self.checkpoint
        if saved is None:
            return runner, self
        different = runner.model.differences(saved.state["model"])
        if others := differences_but_rope(different):
            raise UserError(
                f"{saved.folder} contains another model: {'; '.join(others)}; override only RoPE"
            )
        if problem := saved.damage(mesh.control):
            raise UserError(
                f"{saved.folder} is damaged ({problem}): move it away to evaluate an earlier "
                "checkpoint"
            )
        load_weights(saved, runner.model, mesh.control)
        return runner, replace(
            self,
            notes=(*self.notes, *(f"not as trained: model.{sentence}" for sentence in different)),
        )
