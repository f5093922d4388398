"""A weight version as a value, what changed between two of them, and which of the two travels.

    manifest   tensors, chunks, files; their hashes and checksums
    deltas     the bytes that changed, small; and back
    planning   anchor or delta, and which versions are kept
    shares     which of a learner's machines has what of it
    engine_sums  whether engines hold what they say
    lending    chunks that receivers read from the publisher's memory for themselves

Other packages import everything of `manifest` from here.
"""

from __future__ import annotations

from polyrl.weights.manifest import (
    CHUNK_BYTES as CHUNK_BYTES,
    DTYPE_BYTES as DTYPE_BYTES,
    FIRST_EPOCH as FIRST_EPOCH,
    HASH_BYTES as HASH_BYTES,
    MAX_CHUNK_BYTES as MAX_CHUNK_BYTES,
    MAX_FILES as MAX_FILES,
    MAX_FILES_BYTES as MAX_FILES_BYTES,
    RECEIPT_STRIDE as RECEIPT_STRIDE,
    TOKENIZER_FILE as TOKENIZER_FILE,
    Buffer as Buffer,
    ChunkEntry as ChunkEntry,
    FileEntry as FileEntry,
    StreamCheck as StreamCheck,
    TensorEntry as TensorEntry,
    VersionManifest as VersionManifest,
    WeightsRef as WeightsRef,
    check_manifest as check_manifest,
    chunk_entry as chunk_entry,
    chunk_places as chunk_places,
    cut_chunks as cut_chunks,
    decode_manifest as decode_manifest,
    digest as digest,
    encode_manifest as encode_manifest,
    file_entry as file_entry,
    manifest_hash as manifest_hash,
    missing_chunks as missing_chunks,
    pieces as pieces,
    receipt_of as receipt_of,
    receipt_of_sample as receipt_of_sample,
    receipt_sample as receipt_sample,
    same_layout as same_layout,
    tensor_checksum as tensor_checksum,
    tensor_entry as tensor_entry,
    weights_hash as weights_hash,
)
