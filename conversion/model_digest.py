"""A digest of a model's weights that does not depend on the format or the layout they are stored in."""

import hashlib

from conversion.catalogue import Checkpoint, memory_of, row_blocks
from conversion.reading import model_of

VERSION = "model-1"


def model_digest(checkpoint: Checkpoint) -> str:
    """Return the digest: over canonical names, shapes, types and bits of the weights, in the order of the names.

    Padding rows of the vocabulary are left out, which formats have more or fewer of. Moments, position and settings
    of training have no part in it: two checkpoints with one digest compute the same.

    Returns:
        `model-1:` and a sha256 in hexadecimal.

    Raises:
        InputError: A file is damaged.
    """
    rows = model_of(checkpoint.info, checkpoint.path).vocab_size
    total = hashlib.sha256()
    for name in sorted(checkpoint.info.parameters):
        entry = checkpoint.tensors.entries[name]
        box = entry.box
        if rows is not None and name.startswith(("embedding.word.", "output.")):
            box = ((0, min(rows, entry.shape[0])), *box[1:])
        sizes = "x".join(str(stop - start) for start, stop in box)
        own = hashlib.sha256(f"{name} {sizes} {entry.dtype}\n".encode())
        for block in row_blocks(box, entry.dtype.itemsize):
            own.update(memory_of(checkpoint.tensors.read(name, block)))
        total.update(own.digest())
    return f"{VERSION}:{total.hexdigest()}"
