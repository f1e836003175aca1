"""Run the steps of `python -m benchmarks.loop`. Another call continues with stored results."""

import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks.loop import acceptance, drafts
from benchmarks.loop.corpus import PROMPT_TOKENS, stories
from benchmarks.loop.extraction import (
    CLIENTS,
    extraction_command,
    rows_of_vllms_connector,
    vllms_command,
)
from benchmarks.loop.results import (
    KEPT,
    OURS,
    PLAIN,
    QUAROT,
    TRANSFORMERS,
    VLLMS,
    Kind,
    Results,
    Trained,
)
from benchmarks.loop.rows import SHIFTED, WRONG, rows_of_transformers, write_wrong
from benchmarks.loop.target import Target, build_target, loss_of
from tests.e2e.models.quantised.modelslim import write_modelslim
from vllm_ascend_hsx.demo import DemoError
from vllm_ascend_hsx.demo.report import StartProgress
from vllm_ascend_hsx.demo.server import Program, Server, free_port
from vllm_ascend_hsx.protocol.errors import UserError

QUIET_SECONDS = 20.0
ROWS_SEED, HELD_OUT_SEED = 2, 3

KINDS = tuple(Kind(drafts.EAGLE3, rows) for rows in (OURS, TRANSFORMERS, SHIFTED))
MORE_KINDS = (
    *(Kind(drafts.DFLASH, rows) for rows in (OURS, TRANSFORMERS, SHIFTED)),
    *(Kind(drafts.EAGLE3, rows, QUAROT) for rows in (OURS, TRANSFORMERS, KEPT)),
)
ONCE_KINDS = tuple(
    Kind(drafts.EAGLE3, rows) for rows in (*(wrong for wrong in WRONG if wrong != SHIFTED), VLLMS)
)
Plan = Sequence[tuple[Kind, int]]


def plan_of(seeds: int) -> Plan:
    """Return kind and seed of each draft. More than one seed adds kinds."""
    if seeds == 1:
        return [(kind, 0) for kind in KINDS]
    several = [
        (kind, seed) for kinds in (KINDS, MORE_KINDS) for seed in range(seeds) for kind in kinds
    ]
    return several + [(kind, 0) for kind in ONCE_KINDS]


def file_name(rows: str, target: str) -> str:
    """Return a name for files and directories of these rows."""
    known = {OURS: "hsx", TRANSFORMERS: "transformers", VLLMS: "vllms"}
    return f"{known.get(rows, rows.replace(' ', '-'))}{'' if target == PLAIN else '-quarot'}"


@dataclass(frozen=True)
class Sizes:
    """Amounts of training and measurement."""

    target_steps: int = 300
    stories: int = 512
    epochs: int = 5
    held_out: int = 48


@dataclass
class Loop:
    """A run of all steps.

    Attributes:
        work: directory for all output.
        emulated: returns the environment of a process for a number of emulated NPUs.
        plan: kind and seed of each draft.
    """

    work: Path
    console: Console
    emulated: Callable[[int], Mapping[str, str]]
    start_timeout: float
    request_timeout: float
    plan: Plan
    sizes: Sizes = field(default_factory=Sizes)

    def run(self) -> Results:
        """Run all steps without a stored result, and return all results."""
        self.started = self.shown_at = time.monotonic()
        self.refuse_other_sizes()
        self.model = self.target()
        self.stories = stories(self.sizes.stories, seed=ROWS_SEED)
        self.dataset = self.once("dataset", lambda path: drafts.write_dataset(path, self.stories))
        results = Results.read(self.work / "results.json")
        results.target_loss = loss_of(self.model)
        for kind, seed in self.plan:
            if results.of(kind, seed) is None:
                results.add(self.draft(kind, self.rows(kind.target, kind.rows), seed))
                results.write(self.work / "results.json")
        return results

    def refuse_other_sizes(self) -> None:
        """Raise UserError if the directory has results of other sizes."""
        sizes = json.dumps(asdict(self.sizes))
        path = self.work / "sizes.json"
        if path.exists() and path.read_text() != sizes:
            problem = f"has results with the sizes {path.read_text()}, not {sizes}"
            raise UserError("--output", str(self.work), problem, "Choose a new directory.")
        self.work.mkdir(parents=True, exist_ok=True)
        path.write_text(sizes)

    # Steps

    def target(self) -> Path:
        def on_step(step: int, loss: float) -> None:
            self.show(
                f"training the target: step {step} of {self.sizes.target_steps}, loss {loss:.3f}",
                step == self.sizes.target_steps,
            )

        return build_target(self.work / "target", steps=self.sizes.target_steps, on_step=on_step)

    def served(self, name: str) -> Target:
        """Return the target of this kind for serving."""
        if name == PLAIN:
            return Target(self.model)
        return Target(
            self.once(
                "target-quarot", lambda path: write_modelslim(self.model, path, rotated=True)
            ),
            quantised=True,
        )

    def rows(self, target: str, rows: str) -> Path:
        """Return the directory of these rows; write it if it does not exist."""
        served = self.served(target)
        name = f"rows-{file_name(rows, target)}"
        if rows in WRONG:
            right = self.rows(target, OURS)
            return self.once(name, lambda path: write_wrong(rows, right, path, len(self.stories)))
        makers: dict[str, Callable[[Target, Path], None]] = {
            OURS: self.generate,
            KEPT: partial(self.generate, rotation="keep"),
            TRANSFORMERS: self.reference,
            VLLMS: self.extract_with_vllms,
        }
        return self.once(name, lambda path: makers[rows](served, path))

    def generate(self, target: Target, rows: Path, **options: str) -> None:
        """Extract rows from a server with DP=2 x TP=2 and connector options."""
        storage = rows.with_name("hidden_states")
        shutil.rmtree(storage, ignore_errors=True)
        port, count = free_port(), len(self.stories)
        command = extraction_command(target, storage, port, options)
        with self.server(
            command,
            port,
            f"extraction-{rows.name[1:]}",
            4,
            "the target with extraction, DP=2 x TP=2",
        ) as server:
            command = [
                sys.executable,
                "-m",
                "vllm_ascend_hsx.cli.main",
                "generate",
                "--data",
                str(self.dataset),
            ]
            command += [
                "--output",
                str(storage),
                "--endpoint",
                server.url,
                "--validate",
                "--concurrency",
                str(CLIENTS),
            ]

            def written() -> str:
                return f"{sum(1 for _ in storage.glob('hs_*.safetensors'))} of {count} files"

            self.process(command, "generate", {}, "hsx generate", written)
        storage.rename(rows)

    def extract_with_vllms(self, target: Target, rows: Path) -> None:
        """Extract rows with vLLM's own connector, on one NPU."""
        storage, port = rows.with_name("hidden_states"), free_port()
        shutil.rmtree(storage, ignore_errors=True)
        command, environment = vllms_command(target, storage, port)
        with self.server(
            command,
            port,
            "extraction-vllms",
            1,
            "the target with vLLM's own connector",
            environment,
        ) as server:
            rows_of_vllms_connector(
                server.url, rows, self.stories, self.request_timeout, self.counter(VLLMS)
            )
        shutil.rmtree(storage)

    def reference(self, target: Target, rows: Path) -> None:
        rows_of_transformers(rows, target, self.stories, self.counter(TRANSFORMERS))

    def counter(self, rows: str) -> Callable[[int], None]:
        """Return a function that shows the number of written files."""
        return lambda done: self.show(
            f"rows {rows}: {done} of {len(self.stories)} files", done == len(self.stories)
        )

    def draft(self, kind: Kind, rows: Path, seed: int) -> Trained:
        """Train a draft, serve it, and measure acceptance."""
        name = f"{kind.method}-{file_name(kind.rows, kind.target)}-{seed}"
        directory = self.work / name
        shutil.rmtree(directory, ignore_errors=True)
        epochs = self.sizes.epochs
        command = drafts.train_command(
            kind, self.model, self.dataset, rows, directory, epochs=epochs, seed=seed
        )
        title = f"{kind.method} draft on rows {kind.rows}, seed {seed}"
        began = time.monotonic()

        def trained() -> str:
            return f"{drafts.finished_epochs(directory)} of {epochs} epochs"

        self.process(command, name, self.emulated(1), f"training the {title}", trained)
        took = time.monotonic() - began
        checkpoint = drafts.checkpoint(directory)
        prompts = [
            story[:PROMPT_TOKENS] for story in stories(self.sizes.held_out, seed=HELD_OUT_SEED)
        ]
        port = free_port()
        command = acceptance.serve_command(kind.method, self.served(kind.target), checkpoint, port)
        with self.server(
            command, port, f"{name}-server", 1, f"the target ({kind.target}) with the {title}"
        ) as server:
            counts = acceptance.measure(server.url, prompts, self.request_timeout)
        found = Trained(*kind, seed, drafts.validation_loss(checkpoint), took, *counts)
        self.show(f"{title}: acceptance length {found.length:.2f}", True)
        return found

    # Processes and progress

    def once(self, name: str, make: Callable[[Path], object]) -> Path:
        """Return a directory. If it does not exist, `make` writes it under a hidden name first."""
        path = self.work / name
        if not path.is_dir():
            scratch = self.work / f".{name}"
            shutil.rmtree(scratch, ignore_errors=True)
            make(scratch)
            scratch.rename(path)
        return path

    def server(
        self,
        command: Sequence[str],
        port: int,
        name: str,
        npus: int,
        title: str,
        environment: Mapping[str, str] | None = None,
    ) -> "Serving":
        environment = {"PYTHONUNBUFFERED": "1", **self.emulated(npus), **(environment or {})}
        return Serving(
            Server(command, port=port, log=self.work / f"{name}.log", environment=environment),
            self,
            title,
        )

    def process(
        self,
        command: Sequence[str],
        name: str,
        environment: Mapping[str, str],
        title: str,
        state: Callable[[], str],
    ) -> None:
        """Run a command and wait. Raise DemoError with the end of the output if it fails."""
        with Program(command, log=self.work / f"{name}.log", environment=environment) as program:
            code = program.wait(lambda: self.show(f"{title}: {state()}"))
        if code:
            raise DemoError(f"{title}: exit code {code}\n{program.log_tail()}")
        self.show(f"{title}: {state()}", True)

    def show(self, text: str, always: bool = False) -> None:
        """Print a line of progress, at most one in QUIET_SECONDS unless `always`."""
        now = time.monotonic()
        if always or now - self.shown_at >= QUIET_SECONDS:
            self.console.print(
                f"[{now - self.started:4.0f} s] {text}", highlight=False, markup=False
            )
            self.shown_at = now


@dataclass
class Serving:
    """Context manager for a server that is ready."""

    server: Server
    loop: Loop
    title: str

    def __enter__(self) -> Server:
        self.server.__enter__()
        try:
            with StartProgress(
                self.loop.console, self.server.log, f"vllm serve, {self.title}"
            ) as progress:
                self.server.wait_ready(self.loop.start_timeout, progress)
        except BaseException:
            self.server.stop()
            raise
        return self.server

    def __exit__(self, *_: object) -> None:
        self.server.stop()
