"""A deterministic simulation of the prefill and decode cores, with everything around them that can fail.

    python -m tests.simulation --schedules N --seed S [--replay SEED] [--plant BUG]

runs N schedules, prints how many a second, and shrinks the first that breaks an invariant. `--replay` runs one seed
again, exactly; `--plant` puts a fault into a core first. `pytest tests/simulation -m "not slow"` leaves out the twenty
thousand schedules of `test_simulation.py`.

The cores are the real ones. The agents around them are little ones of the simulation's own (`prefill_agent`,
`decode_agent`): they do what the agents do, but their clock, connections, threads and engines are simulated, and every
decision comes from one list of numbers (`choices`), in which 0 is always the harmless choice.

What is modelled:

- a write is emitted, posted and lands, with any time in between; it reads its source when it lands; a pause, the end of
  its sender, a dropped peer and a cancel flag that is set too late do not stop it, the replacement of an engine object
  does; its report may come early (`unknown`), late, or be wrong after the target's engine object was replaced
- delays have heavy tails: none, short, longer than a deadline
- an agent stops between any two actions, for a while or for ever; so do its threads between queue, flag and bytes
- rows are computed by a stream of their worker, some time after the chunk was submitted, or never by the value that was
  named
- agents come back with new incarnations, workers are lost and come back with new pools
- connections lose their newest messages unseen; as faults beyond what a connection may do, messages overtake or repeat,
  and single ones of those that are said again are lost, which no transfer may feel
- agents are told to stop: they drain for a while, end what is left, say goodbye and come back
- bytes of a segment change on their way, where it has a checksum
- workers abort at any time, retry with the same ticket, reuse pages at once; routers drop requests
- one to two prefill agents (stages, shards, replicas), one to two decode agents (ranks, holders of one shard, groups of
  their own), chunks by tokens or layers in any order with grants, prefixes, rows already held, no rows; one to four
  slots; modes packed, raw and serial, with and without checksums, and pulls out of a mapped pool under a lease, which
  the source's worker outlives

Invariants, checked after every step (`judge`, `pool`):

1. a row is written into a pool by its own agent, for the transfer that holds the page, at its place, with its value;
   one whose bytes do not fit their checksum never, and its transfer ends in `corrupt`
2. after a terminal event nothing touches that transfer's pages (a raw write that hangs past its deadline may read on)
3. no slot is packed, credited or freed while a write that uses it can still land
4. one terminal event a side, at the first tick after the deadline, unless an own operation still has to end
5. `landed` means that every row is there; `sent` that nobody reads
6. `quiesced` and `finished` mean emitted = ended, for ever
7. every slot is in the one state that its users say; at the end all are free and nothing is left over
8. a message of another generation changes nothing, and a peer's fault no transfer of the others
9. when faults have stopped, everything ends, transfers that no fault has touched have arrived, and new ones do

Not modelled: path measurements, writes and pulls that are half done.
"""
