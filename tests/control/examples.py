"""One example of every message; `golden.py` has their bytes."""

from __future__ import annotations

from kvxfer.control import messages as m
from kvxfer.control.handoff_messages import (
    HandoffMessage,
    LastWord,
    MoreEntries,
    PeerPool,
    PeerPoolDropped,
    PoolAccepted,
    PoolOffer,
    PoolRefused,
    SharedStream,
    SlotsMoved,
)
from kvxfer.control.shared_memory import SharedMemory
from kvxfer.layout import Group, LayerRange, Placement, PoolLayout, Shard, StatePart, TokenRange
from kvxfer.streams.device import PoolHandle
from kvxfer.transfer import EventKind, Reason

TRANSFER = "0123456789abcdef0123456789abcdef"
DECODER = "d" * 32
PREFILLER = "f" * 32
POOL = "c" * 32

LAYOUT = PoolLayout(
    groups=(
        Group(
            name="kv",
            layers=LayerRange(0, 61),
            base_offset_bytes=128,
            layer_stride_bytes=1 << 33,
            page_stride_bytes=73728,
            num_pages=1000,
            page_tokens=64,
            row_stride_bytes=1152,
            row_bytes=1152,
        ),
        Group(
            name="state",
            layers=LayerRange(0, 2),
            layer_stride_bytes=4096,
            page_stride_bytes=96,
            num_pages=8,
            page_tokens=1,
            row_stride_bytes=0,
            row_bytes=96,
            placement=Placement.STATE,
            parts=(StatePart(name="conv", num_bytes=64), StatePart(name="ssm", num_bytes=128, split=True)),
        ),
    ),
    shard=Shard(rank=1, size=4, interleave=64),
    dtype_tag="bf16",
)
SOURCE = m.Source(endpoint="tcp://127.0.0.1:4711", incarnation=PREFILLER)
TICKET = m.Ticket(transfer=TRANSFER, sources=(SOURCE, m.Source(endpoint="tcp://[::1]:1", incarnation=POOL, key="k")))
GROUPS = (
    m.GroupPages(
        name="kv", tokens=TokenRange(3, 200), pages=b"\x07\x00\x00\x00\x02\x01\x00\x00", have=(TokenRange(3, 64),)
    ),
    m.GroupPages(name="state", tokens=TokenRange(0, 0)),
)
STATS = m.TransferStats(
    num_rows=12, num_bytes=13824, num_segments=1, num_descriptors=1, num_runs=12, elapsed_s=0.5, send_s=0.25
)
FINISHED = m.Finished(transfer=TRANSFER, generation=9, num_chunks=2, num_segments=5, num_bytes=1 << 40, aux=b"\x00\xff")

EXAMPLES: dict[str, m.Message] = {
    "attach_worker": m.AttachWorker(pool=POOL),
    "attached": m.Attached(incarnation=PREFILLER, source=SOURCE),
    "new_ticket": m.NewTicket(sources=(SOURCE,), deadline_s=60.0),
    "ticket_made": m.TicketMade(ticket=TICKET),
    "submit": m.Submit(
        transfer=TRANSFER,
        groups=GROUPS,
        layers=LayerRange(0, 31),
        last=True,
        aux=b"tok",
        deadline_s=30.0,
        ready=1 << 63,
    ),
    "open": m.Open(ticket=TICKET, groups=GROUPS, deadline_s=2.5),
    "reject_ticket": m.RejectTicket(ticket=TICKET),
    "abort_transfer": m.AbortTransfer(transfer=TRANSFER),
    "slots_mapped": m.SlotsMapped(move=300),
    "peer_pool_mapped": m.PeerPoolMapped(index=254, detail="no peer access"),
    "peer_pool_unmapped": m.PeerPoolUnmapped(index=254),
    "ok": m.Ok(),
    "refused": m.Refused(reason=Reason.LAYOUT_MISMATCH, detail="got 1152, expected 576", field="row_bytes"),
    "transfer_event": m.TransferEvent(transfer=TRANSFER, event=EventKind.LANDED, aux=(b"a", b""), stats=STATS),
    "hello": m.Hello(
        incarnation=DECODER,
        expected_incarnation=PREFILLER,
        pool=POOL,
        layout=LAYOUT,
        dst_rank=1,
        dst_world=4,
        transport="nixl",
        metadata=b"\x00meta",
        region_id=3,
        region_bytes=1 << 26,
        slot_bytes=8 << 20,
        num_slots=8,
        probe_offset_bytes=8 << 23,
        probe_bytes=1 << 20,
    ),
    "welcome": m.Welcome(
        incarnation=PREFILLER,
        pool=POOL,
        layout=LAYOUT,
        segment_bytes=8 << 20,
        figures=m.PathFigures(path="cma", descriptor_s=3e-6, bytes_per_s=1e10),
        pull_path="/run/kvxfer/pull.sock",
    ),
    "goodbye": m.Goodbye(incarnation=DECODER),
    "new_region": m.NewRegion(metadata=b"\x00md", region_id=4, region_bytes=1 << 26),
    "region_taken": m.RegionTaken(region_id=4),
    "ping": m.Ping(incarnation=DECODER, floor=7),
    "grant": m.Grant(
        transfer=TRANSFER,
        generation=9,
        home=True,
        wanted=(TokenRange(3, 200), TokenRange(0, 0)),
        have=((TokenRange(3, 64),), ()),
        remaining_s=12.5,
        floor=7,
        can_pull=True,
        pull_trouble="none",
    ),
    "credits": m.Credits(transfer=TRANSFER, generation=9, region_id=4, first=17, slots=(0, 7)),
    "abort_leg": m.AbortLeg(transfer=TRANSFER, generation=9, reason=Reason.DEADLINE, detail="late"),
    "quiesced_ack": m.QuiescedAck(transfer=TRANSFER, generation=9),
    "pulled": m.Pulled(transfer=TRANSFER, generation=9, chunk=1),
    "query": m.Query(transfer=TRANSFER, generation=9),
    "chunk": m.Chunk(
        transfer=TRANSFER,
        generation=9,
        chunk=1,
        ranges=(TokenRange(3, 200), TokenRange(0, 0)),
        layers=None,
        num_segments=3,
        num_bytes=1 << 33,
    ),
    "pull_chunk": m.PullChunk(
        transfer=TRANSFER,
        generation=9,
        chunk=1,
        ranges=(TokenRange(3, 200), TokenRange(0, 0)),
        layers=LayerRange(0, 30),
        num_segments=3,
        num_bytes=1 << 33,
        pages=(b"\x07\x00\x00\x00", b""),
        lease_word=17,
        lease_value=5,
    ),
    "pull_ready": m.PullReady(transfer=TRANSFER, generation=9, chunk=1),
    "want": m.Want(transfer=TRANSFER, generation=9, num_leased=4),
    "segment": m.Segment(
        transfer=TRANSFER,
        generation=9,
        chunk=1,
        segment=2,
        slot=7,
        num_bytes=8 << 20,
        checksum=b"s\x00\x01\x02\x03\x04\x05\x06\x07",
    ),
    "finished": FINISHED,
    "leg_failed": m.LegFailed(transfer=TRANSFER, generation=9, reason=Reason.WRITE_FAILED, detail="cut"),
    "quiesced": m.Quiesced(transfer=TRANSFER, generation=9, unknown_slots=(3,)),
    "leg_status": m.LegStatus(
        transfer=TRANSFER,
        generation=9,
        state="active",
        num_credited=18,
        segments=(m.Segment(transfer=TRANSFER, generation=9, chunk=0, segment=0, slot=7, num_bytes=1152),),
        finished=FINISHED,
    ),
}
HANDOFF_EXAMPLES: dict[str, HandoffMessage] = {
    "offer": PoolOffer(num_bytes=1 << 34, layout=LAYOUT, pool=SharedMemory(num_bytes=1 << 34)),
    "offer_of_a_stream": PoolOffer(num_bytes=1 << 34, layout=LAYOUT, placement="worker", pid=7),
    "accepted": PoolAccepted(pool=POOL),
    "accepted_stream": PoolAccepted(
        pool=POOL, stream=SharedStream(ring_bytes=1 << 24, num_lanes=16, slots=SharedMemory(num_bytes=65 << 20))
    ),
    "slots_moved": SlotsMoved(move=3, slots=SharedMemory(num_bytes=65 << 20)),
    "peer_pool": PeerPool(
        index=254,
        memory=SharedMemory(num_bytes=1 << 34, gpu=PoolHandle("ab" * 16, 1 << 34, 512, 1 << 35, 4711, bytes(64))),
    ),
    "peer_pool_dropped": PeerPoolDropped(index=2),
    "more_entries": MoreEntries(num_entries=70_000),
    "last_word": LastWord(num_events=7),
    "refused": PoolRefused(detail="pool descriptor: got 0 bytes"),
}
