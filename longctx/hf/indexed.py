"""Indexed attention in models of `transformers`, as in DeepSeek V3.2 and GLM 5: every query attends
to the keys for which a small module, the indexer, computes the best scores.

An indexer hands the index keys of its tokens to the cache, which returns those of all tokens so far
(`update_indexer`); it scores them and returns the positions of the best for each query. Its own
code computes both here: once up to the cache, to learn the index keys of this rank's tokens, and
then for blocks of queries, with a cache that returns the index keys of the whole document. It runs
inside attention, which has the layout: until then, a `Selection` stands for the positions. Layers
that use those of an earlier layer pass it on. This form is recognised, not the name of a model.

Indexers have no gradients, as in transformers: their weights are frozen.
"""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from longctx.attention.expansion import Compressed
from longctx.attention.indexed import LongDocuments, queries_of
from longctx.attention.keeping import kept
from longctx.attention.kernels.sparse import SparseFunctions, sparse_functions, usable
from longctx.attention.ring import RingAttention
from longctx.attention.uncompiled import not_compiled
from longctx.hf.absorbed import attend_absorbed, is_linear
from longctx.hf.exactness import Alone, HuggingFaceError
from longctx.hf.masks import CausalMask
from longctx.planning.cost.indexed import Index, with_index
from longctx.planning.cost.spec import LayerSpec
from longctx.planning.layout import Span

CHILD = "indexer"
ASKS = "update_indexer"
TAKEN = ["indexer_key_states", "layer_idx"]
"""What the cache takes."""
INDEXED_TYPE = "indexed_attention"
"""Type of these layers in configs."""
BLOCK_BYTES = 256 << 20
"""Most bytes of the scores of a block of queries, unless those of one query are more."""
_FROZEN: WeakKeyDictionary[nn.Module, list[nn.Parameter]] = WeakKeyDictionary()
"""Weights of each indexer that had gradients before."""
_LONG: WeakKeyDictionary[RingAttention, dict[int, LongDocuments]] = WeakKeyDictionary()
"""Documents of which keys are selected, by how many."""


class Indexed:
    """Replaces the forward of an indexer by one that returns a `Selection`."""

    def __init__(self, indexer: nn.Module) -> None:
        self.indexer = indexer

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a model, and a pickled one, has its own method, of its class.
        return getattr, (self.indexer, "forward")

    def __call__(self, *arguments: Any, **named: Any) -> "Selection":
        return Selection(self.indexer, arguments, named)


class Selection:
    """The keys that an indexer selects for the tokens of a micro-batch, once attention asks for
    them."""

    def __init__(
        self,
        indexer: nn.Module,
        arguments: tuple[Any, ...],
        named: dict[str, Any],
    ) -> None:
        self.indexer = indexer
        of_any: Any = indexer  # types of modules know only parameters and submodules
        self.most: int = of_any.index_topk
        signature = inspect.signature(type(indexer).forward)
        bound = signature.bind(indexer, *arguments, **named)
        self._inputs: dict[str, Any] = bound.arguments
        self._selected: Tensor | None = None

    @not_compiled
    def attend(
        self,
        ring: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        layer: int | None,
        sink_logits: Tensor | None,
        latents: Compressed | None,
    ) -> Tensor:
        """Returns ring attention, or that of `Alone`, to the selected keys: of latents, where a
        package has kernels that read no others."""
        functions = self._functions(ring, q, latents)
        attention = self.attention(ring, layer, functions)
        if functions is None or attention is ring:
            found: Tensor = attention(
                q,
                k,
                v,
                layer,
                sink_logits=sink_logits,
                compressed=latents,
            )
            return found
        assert latents is not None
        return attend_absorbed(attention, q, latents, layer=layer, sink_logits=sink_logits)

    def _functions(
        self, ring: Any, q: Tensor, latents: Compressed | None
    ) -> SparseFunctions | None:
        """Returns those of a package that can attend to the selected keys."""
        if latents is None or isinstance(ring, Alone):
            return None
        if ring.kernel != "auto" or ring.softcap or ring.scale is None:
            return None
        is_usable = usable(
            q,
            latents.first,
            latents.second,
            deterministic=ring.deterministic,
        )
        if is_usable and is_linear(latents):
            return sparse_functions()
        return None

    def attention(
        self, ring: Any, layer: int | None, functions: SparseFunctions | None = None
    ) -> Any:
        """Returns ring attention, or `Alone`, with the selected keys, by the functions of a package
        if given; as it is if no document of this rank is longer than what is selected."""
        # Weights of the indexer are sharded again once its own layer is done: others only reuse.
        if isinstance(ring, Alone):  # every token sees itself
            if self._inputs:
                ring.seen.append(self._keys())
                self._inputs = {}
            return ring
        long = _long_documents(ring, self.most)
        if self._selected is None:
            self._selected = self._select(long, layer)
            self._inputs = {}
        if not long.shards:
            return ring
        if functions is None:
            return long.attention(ring, self._selected)
        return long.sparse_attention(ring, self._selected, functions)

    def new_ones(self, *_: Any, **__: Any) -> Tensor:
        """Raises HuggingFaceError: attention of transformers begins its mask with this method."""
        raise HuggingFaceError(
            f"{type(self.indexer).__name__} was called without a layout: call the model as "
            "model(**model_inputs(model, batch, ..)), see longctx.hf.attention"
        )

    @kept
    @torch.no_grad()
    def _select(self, long: LongDocuments, layer: int | None) -> Tensor:
        """Returns the positions in its document of the keys that each token sees, int32 [tokens,
        most]; -1: not selected by an indexer."""
        if not long.shards:
            return torch.empty(0)
        keys = self._keys()
        selected = keys.new_full((len(keys), self.most), -1, dtype=torch.int32)
        for shard, whole in long.gather(keys, layer):
            places = torch.arange(shard.length, device=keys.device)
            answer = _Answer(whole)
            for run in queries_of(shard):
                for rows, positions in self._blocks(run, shard.length):
                    queries = torch.arange(
                        positions.start,
                        positions.stop,
                        device=keys.device,
                    )
                    mask = places <= queries.unsqueeze(1)
                    part = slice(rows.start, rows.stop)
                    found = self._run(part, mask.unsqueeze(0), answer)
                    selected[part] = found[0]
        return selected

    def _blocks(
        self,
        run: tuple[range, Span],
        length: int,
    ) -> Iterator[tuple[range, range]]:
        """Yields rows and positions of blocks of a run of queries that see up to `length` keys."""
        heads: int = getattr(self.indexer, "n_heads", 1)
        of_query = 4 * heads * length
        count = max(1, BLOCK_BYTES // of_query)
        rows, (first, last) = run
        positions = range(first, last)
        for start in range(0, len(rows), count):
            stop = start + count
            yield rows[start:stop], positions[start:stop]

    @torch.no_grad()
    def _keys(self) -> Tensor:
        """Returns the index keys of this rank's tokens [tokens, width]."""
        asked = _Asked()
        try:
            self._run(slice(None), None, asked)
        except _Found:
            return asked.keys[0]
        raise HuggingFaceError(f"{type(self.indexer).__name__} never calls {ASKS}")

    def _run(self, rows: slice, mask: Tensor | None, cache: Any) -> Tensor:
        """Runs the indexer's own code on some rows, with the mask [1, rows, keys]."""
        inputs = {}
        for name, value in self._inputs.items():
            inputs[name] = _cut(value, rows, mask)
        inputs["past_key_values"] = cache
        found: Tensor = type(self.indexer).forward(**inputs)
        return found


def _long_documents(ring: RingAttention, most: int) -> LongDocuments:
    """Returns the documents of a micro-batch of which `most` keys are selected, made once."""
    by_most = _LONG.setdefault(ring, {})
    if most not in by_most:
        by_most[most] = LongDocuments(ring, most)
    return by_most[most]


def _cut(value: Any, rows: slice, mask: Tensor | None) -> Any:
    """Returns an argument of an indexer for some rows of the micro-batch."""
    if isinstance(value, CausalMask):
        return mask
    if isinstance(value, tuple):
        return tuple(_cut(each, rows, mask) for each in value)
    if isinstance(value, Tensor):
        return value[:, rows]
    return value


class _Found(Exception):
    """Ends an indexer once its keys are known."""


class _Asked:
    """A cache that takes the index keys of this rank's tokens [1, tokens, width]."""

    keys: Tensor

    def update_indexer(self, keys: Tensor, _: int) -> Tensor:
        self.keys = keys
        raise _Found


class _Answer:
    """A cache that returns the index keys of a document [length, width]."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys

    def update_indexer(self, _: Tensor, __: int) -> Tensor:
        return self.keys.unsqueeze(0)


def indexers(model: nn.Module) -> list[nn.Module]:
    """Returns the indexers of a model. Raises HuggingFaceError for those of another form."""
    found = []
    for module in model.modules():
        child = getattr(module, CHILD, None)
        if isinstance(child, nn.Module):
            if reason := _reason_against(child):
                raise HuggingFaceError(f"{type(child).__name__} {reason}: it is not supported")
            found.append(child)
    return found


def _reason_against(indexer: nn.Module) -> str:
    """Returns why an indexer cannot be run here; empty if it can."""
    forward = type(indexer).forward
    inside = inspect.unwrap(forward)
    names = inside.__code__.co_names
    # Pools of keys are made from more of the cache, its `layers`.
    by_token = ASKS in names and "topk" in names and "layers" not in names
    if not by_token or not hasattr(indexer, "index_topk"):
        return (
            "does not select the keys of single tokens, but compressed keys, pools or blocks, "
            "which split documents would cut"
        )
    if inside is forward:
        return "has gradients, not torch.no_grad as those that are supported: training an indexer"
    taken = _parameters_of_cache()
    if taken != TAKEN:
        return f"hands the cache of this transformers {taken}, not {TAKEN}"
    return ""


def _parameters_of_cache() -> list[str]:
    from transformers import Cache

    method = getattr(Cache, ASKS, None)
    if method is None:
        return []
    _, *others = inspect.signature(method).parameters
    return others


def _selected_in(blocks: Iterable[nn.Module]) -> int:
    """Returns the number of keys that the first indexer selects."""
    first: Any = next(indexer for block in blocks for indexer in indexers(block))
    return int(first.index_topk)


def indexed_layers(
    layers: Sequence[LayerSpec],
    blocks: Sequence[nn.Module],
) -> tuple[LayerSpec, ...]:
    """Returns the sizes of blocks, of those without a window with indexed attention."""
    found: list[LayerSpec] = []
    lent = False  # whether the next block uses what an earlier one selected
    for layer, block in reversed(list(zip(layers, blocks, strict=True))):
        own = indexers(block)
        if layer.window is not None:
            index = Index()
        elif own:
            indexer: Any = own[0]
            most = indexer.index_topk
            index = Index(indexer.n_heads, indexer.head_dim, selected=most, lent=lent)
            lent = False
        else:
            index = Index(selected=_selected_in(blocks))
            lent = True
        found.append(with_index(layer, index))
    return tuple(reversed(found))


def replace_indexers(model: nn.Module) -> None:
    """Lets the indexers of a model hand a `Selection` to ring attention, and freezes their
    weights."""
    for indexer in indexers(model):
        vars(indexer)["forward"] = Indexed(indexer)
        trained = [weight for weight in indexer.parameters() if weight.requires_grad]
        _FROZEN.setdefault(indexer, trained)
        for weight in trained:
            weight.requires_grad_(False)


def restore_indexers(model: nn.Module) -> None:
    """Undoes `replace_indexers`."""
    for module in model.modules():
        for weight in _FROZEN.pop(module, ()):
            weight.requires_grad_(True)
        if isinstance(vars(module).get("forward"), Indexed):
            del vars(module)["forward"]
