"""Images: adds the images of a store's documents to a rank's share of a step."""

from collections.abc import Sequence
from dataclasses import replace

from longctx.data.image_processor import Frames, ImageError, pictures_of
from longctx.data.image_shares import Image, Pixels, share_images
from longctx.data.image_sources import ImagePlace
from longctx.data.packing import MicroBatch
from longctx.data.sampler import Piece
from longctx.data.store import Store
from longctx.planning.plan import Plan


def with_images(store: Store, pieces: Sequence[Piece], plan: Plan, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Returns micro-batches with the images of their documents, of which this rank reads those that it encodes.

    Raises ImageError if a document with images is cut.
    """
    places = {
        number: [ImagePlace.of(numbers, image) for image, numbers in enumerate(found)]
        for number, piece in enumerate(pieces)
        if (found := store.image_places(piece.document))
    }
    if not places:
        return list(micro_batches)
    for number in places:
        if pieces[number].length < store.lengths[pieces[number].document]:
            raise cut_error(store, pieces[number].document, pieces[number].length)
    pictures = pictures_of(store.image_folder)

    def read(images: Sequence[Image]) -> Pixels:
        return pictures.pixels([_image(store, pieces[number].document, places[number][image]) for number, image in images])

    return [replace(each, images=share_images(plan, each.layout, places, read)) for each in micro_batches]


def _image(store: Store, document: int, place: ImagePlace) -> bytes | Frames:
    files = [store.image(document, file) for file in place.files]
    return Frames(files, place.grid) if place.fps else files[0]


def cut_error(store: Store, document: int, length: int) -> ImageError:
    return ImageError(
        f"{store.name(document)} has images and {int(store.lengths[document]):,} tokens, of which only {length:,} fit: images "
        "cannot be cut, so raise batch.tokens_per_rank, use more ranks, or set data.long_documents to drop"
    )
