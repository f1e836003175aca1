"""A fake server of `hsx generate` in a separate process: generate_server.py STORAGE PORT LOG.

Appends the number of each requested row to LOG. A row takes some time, as with a model: a machine
that is switched off then has unfinished rows.
"""

import signal
import sys
import threading
import time
from pathlib import Path

from generate_files import Seen
from generate_harness import FakeServer

ROW_S = 0.02  # seconds


def main(storage: Path, port: int, log: Path) -> None:
    with open(log, "a", buffering=1) as asked:

        def note(seen: Seen, stage: str) -> None:
            if stage == "asked":
                asked.write(f"{seen.row}\n")
            elif stage == "begun":
                time.sleep(ROW_S)

        over = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: over.set())
        with FakeServer(storage, at=note, port=port):
            print("serving", flush=True)
            over.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
