"""Print what a run file of W&B holds, as JSON. A program of its own, so that no test process imports wandb."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record

BLOCK, FILE_HEADER, CHUNK_HEADER = 32768, 7, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(content: bytes) -> Iterator[Record]:
    """The file is a log in LevelDB's format: records in chunks that never cross a block."""
    position, parts = FILE_HEADER, b""
    while position + CHUNK_HEADER <= len(content):
        if BLOCK - position % BLOCK < CHUNK_HEADER:
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        position += CHUNK_HEADER + length
        parts += content[position - length : position]
        if kind in (FULL, LAST):
            yield Record.FromString(parts)
            parts = b""


found = list(records(Path(sys.argv[1]).read_bytes()))
(run,) = (record.run for record in found if record.WhichOneof("record_type") == "run")
rows = [record.history.item for record in found if record.WhichOneof("record_type") == "history"]
history = [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows]
about = {name: getattr(run, name) for name in ("project", "entity", "run_group", "job_type", "display_name", "notes")}
about |= {"host": run.host, "tags": list(run.tags), "git": run.git.ByteSize()}
about["config"] = {item.key: json.loads(item.value_json) for item in run.config.update}
print(json.dumps({"run": about, "history": history, "kinds": sorted({r.WhichOneof("record_type") for r in found})}))
