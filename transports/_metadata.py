"""What a transport tells its peers about itself, as one msgpack map."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvxfer.errors import ProtocolError
from kvxfer.streams.device import PoolHandle
from kvxfer.transports.base import Region

_VERSION = 2
_MAX_METADATA_BYTES = 1 << 20
_Id = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Word = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]


class PublishedRegion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A registered region. `fd`, `inode`, `device` name the file behind it; they are 0 where there is none.

    One in memory of a GPU has its index on the peer's side, -1 for host memory, and, where processes of the host may
    map it, its `handle`; `fd` goes along unless that is a legacy one.
    """

    region_id: _Id
    num_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 50)]
    address: _Word = 0
    fd: _Word = 0
    inode: _Word = 0
    device: _Word = 0
    gpu_index: Annotated[int, msgspec.Meta(ge=-1, le=1023)] = -1
    handle: PoolHandle | None = None


def published(region_id: int, region: Region, *, address: int = 0) -> PublishedRegion:
    """`region`, as peers hear of it; for memory of a GPU with its descriptor, where there is one."""
    return PublishedRegion(
        region_id,
        region.num_bytes,
        address,
        0 if region.handle is None else region.fd or 0,
        gpu_index=region.gpu_index,
        handle=region.handle,
    )


class Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`endpoint` names the engine object (it changes with every rotation), `engine` is the engine's own blob."""

    transport: _Name
    endpoint: _Name
    regions: Annotated[list[PublishedRegion], msgspec.Meta(max_length=4096)]
    pid: _Word = 0
    host: Annotated[str, msgspec.Meta(max_length=255)] = ""
    engine: Annotated[bytes, msgspec.Meta(max_length=_MAX_METADATA_BYTES)] = b""
    version: int = _VERSION


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Metadata)


def encode_metadata(metadata: Metadata) -> bytes:
    return _encoder.encode(metadata)


def decode_metadata(data: bytes, transport: str) -> Metadata:
    """Parse a peer's metadata for `transport`. Raises `ProtocolError` for anything else."""
    if len(data) > _MAX_METADATA_BYTES:
        raise ProtocolError(f"metadata: got {len(data)} bytes, expected at most {_MAX_METADATA_BYTES}")
    try:
        metadata = _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"metadata of {len(data)} bytes: {error}") from error
    if metadata.version != _VERSION or metadata.transport != transport:
        raise ProtocolError(
            f"metadata: got transport {metadata.transport!r} version {metadata.version}, "
            f"expected {transport!r} version {_VERSION}"
        )
    if len({region.region_id for region in metadata.regions}) != len(metadata.regions):
        raise ProtocolError("metadata: got a region id twice, expected each once")
    return metadata
