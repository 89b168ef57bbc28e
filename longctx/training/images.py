"""Images of a step on this rank: positions of their tokens, and the exchange of their features inside the domain."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from longctx.attention.host_to_device import copy_to
from longctx.data.image_shares import ImageShare
from longctx.data.packing import MicroBatch
from longctx.errors import UserError
from longctx.model.huggingface import TransformersModel
from longctx.model.protocol import Model
from longctx.model.vision import IN_BOTH_DIRECTIONS, Images, image_positions, is_vision
from longctx.parallel.all_to_all import exchange_rows
from longctx.parallel.mesh import Mesh
from longctx.planning.layout import Span


def images_of(micro_batch: MicroBatch, model: Model, mesh: Mesh) -> tuple[Images | None, torch.Tensor]:
    """As `read_images`, for a model of a run. Raises UserError if it reads no images."""
    if micro_batch.images is None:
        return None, copy_to(micro_batch.positions, mesh.device)
    if not isinstance(model, TransformersModel) or not is_vision(model.hf):
        raise UserError(
            f"{type(model).__name__} reads no images, but documents have some: set model.from_pretrained to one that does"
        )
    return read_images(micro_batch, micro_batch.images, model.hf, mesh.domain.get_group(), mesh.device)


def read_images(
    micro_batch: MicroBatch, share: ImageShare, hf: Any, group: dist.ProcessGroup | None, device: torch.device
) -> tuple[Images, torch.Tensor]:
    """Returns the images `share` of a micro-batch, and the positions of its tokens, on the device.

    These are [tokens], or [axes, tokens] if the code of the model `hf` gives tokens of images several positions. `group` has
    the ranks of the domain; None: there is one.
    """
    pixels = {name: copy_to(value, device) for name, value in share.pixels.items()}
    several = _positions(micro_batch, share, hf)
    return Images(pixels, partial(_share, share, group)), copy_to(micro_batch.positions if several is None else several, device)


def blocks_of(micro_batch: MicroBatch, hf: Any) -> dict[int, list[Span]]:
    """Returns the spans of images, by document, whose tokens see each other in both directions: of Gemma 3 all images.

    `hf` is the model of transformers; None: the native decoder.
    """
    share = micro_batch.images
    if share is None or hf is None or hf.config.model_type not in IN_BOTH_DIRECTIONS:
        return {}
    return {
        document: [(place.start, place.start + place.tokens) for place in places] for document, places in share.places.items()
    }


def _share(share: ImageShare, group: dist.ProcessGroup | None, features: torch.Tensor) -> torch.Tensor:
    device, expected = features.device, len(share.sent_rows)
    if expected and len(features) != expected:
        raise UserError(
            f"the model makes {len(features)} features of images that have {expected} tokens: prepare documents with the "
            "processor of the model"
        )
    rows = features[copy_to(share.sent_rows, device)]
    arrived = rows if group is None else exchange_rows(rows, share.sent, share.received, group)
    return arrived[copy_to(share.order, device)]


def _positions(micro_batch: MicroBatch, share: ImageShare, hf: Any) -> torch.Tensor | None:
    """Returns the positions [axes, tokens] of this rank's rows; None if each token has one position."""
    found = None
    for shard in micro_batch.layout.shards:
        if shard.document not in share.places:
            continue
        whole = image_positions(hf, shard.length, share.places[shard.document])
        if whole is None:
            return None
        found = micro_batch.positions.expand(len(whole), -1).clone() if found is None else found
        held = torch.cat([whole[:, slice(*shard.head)], whole[:, slice(*shard.tail)]], dim=1)
        found[:, shard.offset : shard.offset + shard.tokens] = held
    return found
