"""Sinks store extracted rows.

`base` defines the contract of a sink. `file`, `shard` and `mooncake` implement it. `destination`
creates the sink for the option `sink`.

Decisions

* Space is reserved with the first rows: a full disk fails the request early. Not on tmpfs.
* CRC-32C is computed per write and combined at the end, so any thread may write any part. The
  digits of the checksum count as zeros.
* Durable files: data, fdatasync, name, fsync of the directory, release of the lock. If the last
  sync fails, the name is removed.
* FP8 (`encoder`): writer threads convert rows in page-aligned memory. Values, scales and
  dequantised rows equal hs-connectors' bit for bit.
* Each sink has a hidden directory `.hsx-TOKEN` with an flock on `lock` (`workspace`). The kernel
  releases it when the server dies, and the next server removes the orphan (`orphans`). No process
  id is read, so servers may start and die in one directory at the same time. A directory without
  the lock file is not an orphan: a purge may have removed the lock of a living server.
* An flock may be local to a machine (Lustre `localflock`, NFS `nolock`), so a thread touches the
  lock file every 30 seconds. Boot id and device number decide whether one kernel has all locks. A
  host name would separate containers that share locks.
* Without `use_synchronization_lock` the directory is `.hsx-unlocked-TOKEN`, and nothing is
  removed.
* A file has the group of the folder. A folder may be setgid.
* The storage directory is a path. It is compared with the open directory at the start and before
  publication. A replaced directory fails the request.
* A name is used once. Replacing rows would need an order of requests across ranks, restarts and
  clocks. `Storage.publish` uses link(2), so an existing name fails. The scheduler does not look
  into the directory, because storage that hangs would stop the engine.
* Shards are tar files with a line in an index for each member (`shard`). A failed append is at
  the end and is cut off. Hidden files are reused: on ext4 inodes cost more than the copy. Members
  equal the files that `sink=file` writes, byte for byte.
"""
